"""The compiled core of rallocator. Private: use the functions of `rallocator`."""

from typing import final

@final
class ParsedConfig:
    """What a text of settings says."""

    @property
    def given(self) -> list[tuple[str, str]]:
        """Each key that the text gives, once, with the value that counts, without white space. Inert keys too."""

    @property
    def inert(self) -> list[str]:
        """The given keys of torch's that change nothing here."""

    @property
    def effective(self) -> list[tuple[str, str]]:
        """Every setting that acts and its value in words, in a fixed order."""

    @property
    def text(self) -> str:
        """The settings that differ from the defaults, in a fixed order: equal texts are equal settings."""

def parse_config(text: str) -> ParsedConfig:
    """Read settings written as `key:value,key:value`, in torch's grammar.

    Arguments:
        text: the settings. White space does not count; of a repeated key the last value wins.

    Raises:
        ConfigError: the first thing wrong with the text, with the key and what would have been accepted.
    """
