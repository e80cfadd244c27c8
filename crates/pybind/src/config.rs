//! Settings for Python: the core's one parser, and its refusals as Python's `ConfigError`.

use alloc_core::config::{Config, Move, Parsed, Policy};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

pyo3::import_exception!(rallocator.errors, ConfigError);

/// Adds the function and its answer to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ParsedConfig>()?;
    module.add_function(wrap_pyfunction!(parse_config, module)?)
}

/// What a text of settings says; the counterpart of the core's `Parsed`.
#[pyclass(frozen, get_all, module = "rallocator._core")]
struct ParsedConfig {
    given: Vec<(String, String)>,
    inert: Vec<String>,
    effective: Vec<(&'static str, String)>,
    text: String,
}

/// Reads settings written in torch's grammar.
#[pyfunction]
fn parse_config(text: &str) -> PyResult<ParsedConfig> {
    let Parsed { config, given, inert } = parse(text)?;
    Ok(ParsedConfig { given, inert, effective: config.describe(), text: config.to_string() })
}

/// The settings as snapshots tell of them: the policy too where it is the default, or a reader took torch's rules for ours.
pub(crate) fn recorded(config: &Config) -> String {
    let changed = config.to_string();
    let policy = config.describe().into_iter().find(|(key, _)| *key == "policy");
    match policy {
        Some((key, value)) if config.policy == Policy::default() => {
            let named = format!("{key}:{value}");
            if changed.is_empty() { named } else { format!("{named},{changed}") }
        }
        _ => changed,
    }
}

/// How memory is kept from moving, by a word that came from Python.
pub(crate) fn moving(word: &str) -> PyResult<Move> {
    let refusal = || PyValueError::new_err(format!("moving must be \"off\" or \"contiguous\", not {word:?}"));
    Move::from_name(word).filter(|moving| *moving != Move::On).ok_or_else(refusal)
}

/// The settings of a text that came from Python.
pub(crate) fn parse(text: &str) -> PyResult<Parsed> {
    Config::parse(text).map_err(|error| ConfigError::new_err(error.to_string()))
}
