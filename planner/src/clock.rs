//! The planner's clock, read at its edges only.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vmferry_types::Timestamp;

/// Reads the wall clock.
#[must_use]
pub fn now() -> Timestamp {
    Timestamp(now_us() / 1000)
}

/// Reads the wall clock in microseconds since 1970.
#[must_use]
pub fn now_us() -> u64 {
    #[cfg(feature = "simulation")]
    if let Some(now) = simulated::now_us() {
        return now;
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Lets a task read the clock of whoever starts it, and stand still with it.
#[cfg(feature = "simulation")]
pub(crate) fn inherit<F>(task: F) -> impl Future<Output = F::Output> + Send
where
    F: Future + Send,
{
    simulated::on(simulated::machine(), task)
}

/// There is one clock.
#[cfg(not(feature = "simulation"))]
pub(crate) const fn inherit<F>(task: F) -> F {
    task
}

#[cfg(feature = "simulation")]
pub mod simulated;

/// Writes a moment as RFC 3339 in UTC with milliseconds; empty for the moment zero.
#[must_use]
pub fn rfc3339(at: Timestamp) -> String {
    rfc3339_us(at.value().saturating_mul(1000))
}

/// Writes a moment given in microseconds since 1970 as RFC 3339 in UTC; empty for zero.
#[must_use]
pub fn rfc3339_us(at_us: u64) -> String {
    // Past the year 9999 there is no RFC 3339; such a moment can only be a corrupt figure.
    const LAST_US: u64 = 253_402_300_799_000_000;
    if at_us == 0 {
        return String::new();
    }
    let at = UNIX_EPOCH + Duration::from_micros(at_us.min(LAST_US));
    humantime::format_rfc3339_micros(at).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_in_utc() {
        assert_eq!(rfc3339(Timestamp(0)), "");
        assert_eq!(rfc3339(Timestamp(1_500)), "1970-01-01T00:00:01.500000Z");
        assert!(!rfc3339(Timestamp(u64::MAX)).is_empty());
    }
}
