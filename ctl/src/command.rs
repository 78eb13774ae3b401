//! What can be asked for: one noun a file.

pub(crate) mod capacity;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod emptying;
pub(crate) mod gates;
pub(crate) mod host;
pub(crate) mod migration;
pub(crate) mod pki;
pub(crate) mod plan;
pub(crate) mod queue;
pub(crate) mod runtime;
pub(crate) mod vm;
