"""The report of a replay: one page of HTML that opens offline, with all that it shows inside.

`contents` works out what is shown, `page` writes it down, and `report.js` draws it: timelines and the map of addresses,
from columns of numbers. Nobody is asked for anything, and nothing of the recorded program is in it but sizes, times
and, unless left out, the names in its stacks.
"""

from __future__ import annotations

from rallocator._report.contents import Frames
from rallocator._report.page import write_page

__all__ = ["Frames", "write_page"]
