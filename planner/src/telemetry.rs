//! What the planner says of itself: logs on stderr, one line an event.

use tracing_subscriber::EnvFilter;

/// Sends logs to stderr; `RUST_LOG` chooses, `info` is the default.
///
/// # Errors
///
/// Fails if this process already has a subscriber.
pub fn install() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init()
}

/// Writes an error with all its causes, as one line.
#[derive(Debug)]
pub struct Chain<'a>(pub &'a (dyn std::error::Error + 'a));

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
