//! The clocks of this machine.

use std::time::{SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};
use vmferry_types::Millis;

/// Returns the time in milliseconds since 1970, for people and for other machines.
#[must_use]
pub fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Returns `CLOCK_MONOTONIC` in microseconds: what limits are measured by.
#[must_use]
pub fn monotonic_us() -> u64 {
    let Ok(now) = clock_gettime(ClockId::CLOCK_MONOTONIC) else { return 0 };
    let seconds = u64::try_from(now.tv_sec()).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec()).unwrap_or(0);
    seconds.saturating_mul(1_000_000).saturating_add(nanos / 1000)
}

/// Returns `CLOCK_MONOTONIC` in milliseconds.
#[must_use]
pub fn monotonic() -> Millis {
    Millis(monotonic_us() / 1000)
}
