//! The clocks of a simulated world, one world a thread. A thread that has none reads the real one.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use tokio::time::Instant;

thread_local! {
    static BASE: Cell<Option<(Instant, u64)>> = const { Cell::new(None) };
    static MACHINE: RefCell<Option<Arc<Machine>>> = const { RefCell::new(None) };
}

/// Lets the time of this thread be `now_us`, and pass as tokio's does.
pub fn set(now_us: u64) {
    BASE.set(Some((Instant::now(), now_us)));
}

/// Reads the wall clock of the machine whose task runs right now.
pub(super) fn now_us() -> Option<u64> {
    let skew = MACHINE.with_borrow(|machine| machine.as_ref().map_or(0, |machine| machine.skew()));
    Some(true_us()?.saturating_add_signed(skew))
}

/// Reads the wall clock of a machine whose clock is right.
#[must_use]
pub fn true_us() -> Option<u64> {
    let (since, base) = BASE.get()?;
    let passed = Instant::now().saturating_duration_since(since);
    Some(base.saturating_add(u64::try_from(passed.as_micros()).unwrap_or(u64::MAX)))
}

/// A machine that a planner runs on: its clock may be wrong, and it may stop for a while.
#[derive(Debug, Default)]
pub struct Machine {
    skew_us: AtomicI64,
    frozen: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Machine {
    /// Returns how far its clock is ahead, in microseconds.
    #[must_use]
    pub fn skew(&self) -> i64 {
        self.skew_us.load(Ordering::Relaxed)
    }

    /// Puts its clock, so many microseconds ahead of the right one.
    pub fn set_skew(&self, skew_us: i64) {
        self.skew_us.store(skew_us, Ordering::Relaxed);
    }

    /// Lets nothing on it go on.
    pub fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// Lets everything on it go on.
    pub fn thaw(&self) {
        self.frozen.store(false, Ordering::Relaxed);
        let waiting =
            std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// Returns the machine whose task runs right now.
pub(super) fn machine() -> Option<Arc<Machine>> {
    MACHINE.with_borrow(Clone::clone)
}

/// Runs a task on a machine.
pub fn on<F>(
    machine: Option<Arc<Machine>>,
    task: F,
) -> impl Future<Output = F::Output> + Send + use<F>
where
    F: Future + Send,
{
    let mut task = Box::pin(task);
    std::future::poll_fn(move |context| {
        if let Some(machine) = &machine
            && machine.frozen.load(Ordering::Relaxed)
        {
            let mut waiting = machine.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.push(context.waker().clone());
            return Poll::Pending;
        }
        let outer = MACHINE.replace(machine.clone());
        let polled = task.as_mut().poll(context);
        MACHINE.set(outer);
        polled
    })
}
