//! QMP without a socket: bytes in, bytes out.
//!
//! QEMU's monitor speaks JSON lines. This crate turns bytes into messages
//! ([`codec`]), keeps one conversation in order ([`session`]), and types what
//! is said ([`command`], [`event`], [`migration`]). It opens no socket, reads
//! no clock and starts no thread, so each case a real monitor can bring about
//! is a plain test.
//!
//! A newer QEMU must never break it: unknown events, fields, enum values and
//! error classes are carried as they are. Only what is not QMP at all ends a
//! session, with an error that names it.

#![warn(missing_docs)]

pub mod codec;
pub mod command;
pub mod event;
pub mod migration;
pub mod session;

pub use qapi::{Command, qmp as schema};

pub use crate::codec::{CodecError, Greeting, Message, Refused, Reply};
pub use crate::event::{Event, EventView};
pub use crate::migration::{MigrateInfo, MigrationStatus, RunState};
pub use crate::session::{Band, Output, RequestId, Session, SessionError, Transmit};
