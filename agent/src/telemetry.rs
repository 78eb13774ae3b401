//! Logs: to stderr, by `RUST_LOG`.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// Begins to log. Fragments and fields for people on a terminal, JSON lines for a collector.
///
/// # Errors
///
/// Fails if somebody logs already.
pub fn init() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if std::io::stderr().is_terminal() {
        builder.try_init()
    } else {
        builder.json().with_span_list(false).flatten_event(true).try_init()
    }
}
