//! Text for people, made from the planner's messages. Nothing here prints.

pub(crate) mod capacity;
pub(crate) mod doctor;
pub(crate) mod emptying;
pub(crate) mod host;
pub(crate) mod migration;
pub(crate) mod pki;
pub(crate) mod quantity;
pub(crate) mod runtime;
pub(crate) mod table;
pub(crate) mod vm;
