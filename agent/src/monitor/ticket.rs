//! Decides, once, whether a command was sent or given up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::Delivery;

const WAITING: u8 = 0;
const SENT: u8 = 1;
const GIVEN_UP: u8 = 2;

/// The caller's half: gives up when it is dropped.
///
/// The driver and the caller race for the same cell, so a caller that was
/// told [`Delivery::Unsent`] can rely on it for good.
#[derive(Debug)]
pub(super) struct Ticket(Arc<AtomicU8>);

/// The driver's half.
#[derive(Debug)]
pub(super) struct Stub(Arc<AtomicU8>);

impl Ticket {
    pub(super) fn new() -> Self {
        Self(Arc::new(AtomicU8::new(WAITING)))
    }

    pub(super) fn stub(&self) -> Stub {
        Stub(Arc::clone(&self.0))
    }

    /// Gives the command up and tells whether that came in time.
    pub(super) fn give_up(&self) -> Delivery {
        match self.0.compare_exchange(WAITING, GIVEN_UP, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(GIVEN_UP) => Delivery::Unsent,
            Err(_) => Delivery::Sent,
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl Stub {
    /// Takes the command for sending; `false` if its caller has given up.
    pub(super) fn take(&self) -> bool {
        self.0.compare_exchange(WAITING, SENT, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_up_is_never_taken() {
        let ticket = Ticket::new();
        let stub = ticket.stub();
        assert_eq!(ticket.give_up(), Delivery::Unsent);
        assert!(!stub.take());
        assert_eq!(ticket.give_up(), Delivery::Unsent);
    }

    #[test]
    fn what_was_taken_is_never_called_unsent() {
        let ticket = Ticket::new();
        assert!(ticket.stub().take());
        assert_eq!(ticket.give_up(), Delivery::Sent);
    }

    #[test]
    fn a_dropped_caller_has_given_up() {
        let ticket = Ticket::new();
        let stub = ticket.stub();
        drop(ticket);
        assert!(!stub.take());
    }
}
