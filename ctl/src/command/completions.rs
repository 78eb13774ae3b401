//! Completion scripts.

use clap::CommandFactory as _;
use clap_complete::Shell;

/// Returns the completion script for `shell`.
pub(crate) fn script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut crate::Cli::command(), "vmferry", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
