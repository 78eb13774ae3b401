//! Quantities with their units.

use std::time::Duration;
use vmferry_types::Bytes;

/// Writes a span of time: `850 ms`, `3.2 s`, `2 min 5 s`, `1 h 4 min`.
pub(crate) fn duration(time: Duration) -> String {
    micros(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

/// Writes milliseconds as [`duration`] does.
pub(crate) fn millis(ms: u64) -> String {
    micros(ms.saturating_mul(1000))
}

/// Writes microseconds as [`duration`] does, with a decimal below 100 ms.
pub(crate) fn micros(us: u64) -> String {
    let ms = us / 1000;
    let seconds = ms / 1000;
    match ms {
        0..100 if !us.is_multiple_of(1000) => format!("{ms}.{} ms", us % 1000 / 100),
        0..1000 => format!("{ms} ms"),
        1000..60_000 => format!("{seconds}.{} s", ms % 1000 / 100),
        60_000..3_600_000 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// Writes an amount of data or memory.
pub(crate) fn bytes(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

/// Writes a rate.
pub(crate) fn rate(bytes_per_second: u64) -> String {
    format!("{}/s", Bytes(bytes_per_second))
}

/// Writes CPU in whole or partial vCPUs.
pub(crate) fn cpus(milli: u64) -> String {
    match milli % 1000 {
        0 => format!("{} vCPU", milli / 1000),
        rest => format!("{}.{} vCPU", milli / 1000, rest / 100),
    }
}

/// Returns `text`, or `otherwise` where there is none.
pub(crate) fn quoted_or(text: &str, otherwise: &str) -> String {
    if text.is_empty() { otherwise } else { text }.to_owned()
}

/// Returns `text`, or a dash where there is none: an empty cell would shift what a reader sees.
pub(crate) fn or_dash(text: &str) -> String {
    quoted_or(text, "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_the_unit_that_fits_it() {
        for (us, text) in [
            (0, "0 ms"),
            (400, "0.4 ms"),
            (12_000, "12 ms"),
            (12_340, "12.3 ms"),
            (850_999, "850 ms"),
            (3_200_000, "3.2 s"),
            (125_000_000, "2 min 5 s"),
            (3_840_000_000, "1 h 4 min"),
        ] {
            assert_eq!(micros(us), text);
        }
    }

    #[test]
    fn part_of_a_cpu_shows() {
        assert_eq!(cpus(2000), "2 vCPU");
        assert_eq!(cpus(1500), "1.5 vCPU");
    }
}
