//! What moves took, and how two ways to move compare.

use std::fmt;

use serde_json::{Value, json};

/// What one move took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Move {
    /// From the request until the guest runs on the destination and the source's QEMU is gone.
    pub(super) wall_us: u64,
    /// Host clock from the source's STOP to the destination's RESUME.
    pub(super) guest_pause_us: u64,
    /// QEMU's own figure.
    pub(super) downtime_ms: u64,
    /// The longest that an outsider waited for the guest's next line at the hand-over.
    pub(super) serial_gap_us: u64,
    /// How much crossed: both ways have to carry as much.
    pub(super) sent_bytes: u64,
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>8.1} ms (paused {:>6.1} ms, QEMU {:>4} ms, serial {:>6.1} ms, {:>4} MiB)",
            ms(self.wall_us),
            ms(self.guest_pause_us),
            self.downtime_ms,
            ms(self.serial_gap_us),
            self.sent_bytes >> 20
        )
    }
}

/// Moves in pairs: by QMP alone, by vmferry.
#[derive(Debug, Default)]
pub(super) struct Figures {
    pairs: Vec<(Move, Move)>,
}

/// One column of the figures.
type Column = (&'static str, fn(&Move) -> f64);

const COLUMNS: [Column; 5] = [
    ("wall_ms", |m| ms(m.wall_us)),
    ("guest_pause_ms", |m| ms(m.guest_pause_us)),
    ("downtime_ms", |m| ms(m.downtime_ms.saturating_mul(1000))),
    ("serial_gap_ms", |m| ms(m.serial_gap_us)),
    ("sent_mib", |m| f64::from(u32::try_from(m.sent_bytes >> 20).unwrap_or(u32::MAX))),
];

impl Figures {
    pub(super) fn push(&mut self, raw: Move, vmferry: Move) {
        self.pairs.push((raw, vmferry));
    }

    /// Lays the medians out for people.
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "{:<16} {:>10} {:>10} {:>16} {:>7}\n",
            "median of", "raw", "vmferry", "of differences", "ratio"
        );
        for (name, column) in COLUMNS {
            let (raw, vmferry) = (self.raw(column), self.vmferry(column));
            let difference = self.difference(column);
            let ratio = if raw > 0.0 { vmferry / raw } else { 0.0 };
            text += &format!(
                "{name:<16} {raw:>10.1} {vmferry:>10.1} {difference:>+16.1} {ratio:>7.3}\n"
            );
        }
        text + &format!("{} pairs of moves", self.pairs.len())
    }

    pub(super) fn json(&self) -> Value {
        let side = |of: &dyn Fn(Column) -> f64| -> Value {
            COLUMNS.iter().map(|column| (column.0.to_owned(), json!(round(of(*column))))).collect()
        };
        json!({
            "raw": side(&|column| self.raw(column.1)),
            "vmferry": side(&|column| self.vmferry(column.1)),
            "difference": side(&|column| self.difference(column.1)),
            "runs": self.pairs.len(),
        })
    }

    fn raw(&self, column: fn(&Move) -> f64) -> f64 {
        median(self.pairs.iter().map(|(raw, _)| column(raw)).collect())
    }

    fn vmferry(&self, column: fn(&Move) -> f64) -> f64 {
        median(self.pairs.iter().map(|(_, vmferry)| column(vmferry)).collect())
    }

    /// What vmferry took more, pair by pair: what disturbs the machine disturbs both of a pair.
    fn difference(&self, column: fn(&Move) -> f64) -> f64 {
        median(self.pairs.iter().map(|(raw, vmferry)| column(vmferry) - column(raw)).collect())
    }
}

/// Returns the median; 0 of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.get(middle) {
        None => 0.0,
        Some(upper) if values.len() % 2 == 1 => *upper,
        Some(upper) => f64::midpoint(values[middle - 1], *upper),
    }
}

/// Microseconds as milliseconds.
fn ms(us: u64) -> f64 {
    std::time::Duration::from_micros(us).as_secs_f64() * 1e3
}

fn round(ms: f64) -> f64 {
    (ms * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn took(wall_us: u64) -> Move {
        Move { wall_us, ..Move::default() }
    }

    #[test]
    fn medians_are_of_each_side_and_of_the_differences() {
        let mut figures = Figures::default();
        for (raw, vmferry) in [(1000, 1100), (5000, 5050), (2000, 2300)] {
            figures.push(took(raw), took(vmferry));
        }
        let json = figures.json();
        assert_eq!(json["raw"]["wall_ms"], 2.0);
        assert_eq!(json["vmferry"]["wall_ms"], 2.3);
        assert_eq!(json["difference"]["wall_ms"], 0.1);
        assert_eq!(json["runs"], 3);
    }

    #[test]
    fn the_median_of_two_lies_between_them() {
        assert_eq!(median(vec![3.0, 1.0]), 2.0);
        assert_eq!(median(Vec::new()), 0.0);
    }
}
