//! What is said to whoever watches.

use std::io::Write as _;

/// Prints a line at once.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Nobody reads any more where this fails; the exit code says how it went.
    writeln!(out, "{line}").and_then(|()| out.flush()).ok();
}

/// Prints a line where errors go.
pub fn complain(line: &str) {
    writeln!(std::io::stderr().lock(), "{line}").ok();
}
