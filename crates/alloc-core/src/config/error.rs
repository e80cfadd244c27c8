//! What can be wrong with the text of settings.

/// Why a text of settings was refused. Nothing of it is in force; mend the text and read it again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Two commas in a row, or one before the first setting. Remove one.
    #[error("setting {position} is empty: there is a comma too many")]
    EmptySetting {
        /// Which setting, counted from 1.
        position: usize,
    },
    /// No `key:value`, as in `key`, `key:` or `key=value`. Write a colon and a value.
    #[error("`{setting}` is not a setting: write key:value")]
    NoValue {
        /// The text between two commas.
        setting: String,
    },
    /// Brackets or colons in the wrong place. Write `[item:value,item:value]`, or a value without brackets.
    #[error("{key}: `{value}` is neither one value nor a list like [256:1,512:2,>:8]")]
    Malformed {
        /// Whose value it is.
        key: String,
        /// The value as written, without white space.
        value: String,
    },
    /// Neither torch nor rallocator has such a setting. Mend the spelling or remove it.
    #[error("unknown setting `{key}`{}", nearest.map(|key| format!(": did you mean `{key}`?")).unwrap_or_default())]
    UnknownKey {
        /// The key as written.
        key: String,
        /// A key that is spelled almost so.
        nearest: Option<&'static str>,
    },
    /// A value outside what the key takes. Choose one inside.
    #[error("{key}:{value} is not accepted: {key} takes {expected}")]
    InvalidValue {
        /// Whose value it is.
        key: &'static str,
        /// The value as written, without white space.
        value: String,
        /// What would have been accepted.
        expected: String,
    },
    /// A request for CUDA's own allocator, which cannot be used beside this one. Unset it.
    #[error("backend:cudaMallocAsync asks for another allocator: unset it to use rallocator")]
    OtherBackend,
}
