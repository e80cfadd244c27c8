//! The grammar of settings: text to keys and values, whatever they mean.

use std::fmt;

use super::error::ConfigError;

/// What stands behind a key's colon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value<'a> {
    /// A word or number, never empty.
    Word(&'a str),
    /// `[item:value,…]`, possibly empty.
    List(Vec<(&'a str, &'a str)>),
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => formatter.write_str(word),
            Self::List(items) => {
                let items: Vec<String> = items.iter().map(|(item, value)| format!("{item}:{value}")).collect();
                write!(formatter, "[{}]", items.join(","))
            }
        }
    }
}

/// Removes white space, which counts nowhere, not even inside a word.
pub(super) fn without_white_space(text: &str) -> String {
    text.chars().filter(|character| !character.is_whitespace()).collect()
}

/// Splits a text without white space into its keys and values, in order, repeated keys included.
pub(super) fn settings(text: &str) -> Result<Vec<(&str, Value<'_>)>, ConfigError> {
    let parts = split_at_commas(text);
    parts.into_iter().enumerate().map(|(index, part)| setting(index + 1, part)).collect()
}

fn setting(position: usize, text: &str) -> Result<(&str, Value<'_>), ConfigError> {
    if text.is_empty() {
        return Err(ConfigError::EmptySetting { position });
    }
    match text.split_once(':') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key, parse_value(key, value)?)),
        _ => Err(ConfigError::NoValue { setting: text.to_owned() }),
    }
}

fn parse_value<'a>(key: &str, text: &'a str) -> Result<Value<'a>, ConfigError> {
    let value = match text.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').and_then(list),
        None => is_word(text).then_some(Value::Word(text)),
    };
    value.ok_or_else(|| ConfigError::Malformed { key: key.to_owned(), value: text.to_owned() })
}

fn list(text: &str) -> Option<Value<'_>> {
    let items = split_at_commas(text).into_iter().map(|part| part.split_once(':'));
    let items: Option<Vec<_>> =
        items.map(|pair| pair.filter(|(item, value)| is_word(item) && is_word(value))).collect();
    items.map(Value::List)
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && !text.contains(['[', ']', ':'])
}

/// The parts between commas that stand outside brackets. A last part that is empty is dropped, which makes an empty text
/// and one trailing comma fine.
fn split_at_commas(text: &str) -> Vec<&str> {
    let mut inside_list = false;
    let is_separator = |character: char| {
        match character {
            '[' => inside_list = true,
            ']' => inside_list = false,
            _ => {}
        }
        character == ',' && !inside_list
    };
    let mut parts: Vec<&str> = text.split(is_separator).collect();
    if parts.last().is_some_and(|part| part.is_empty()) {
        parts.pop();
    }
    parts
}
