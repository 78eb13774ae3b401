//! What a guest's lines say: whether it is the same guest, whether anything was
//! lost or ran twice, and how long it stood still.

use anyhow::{Result, bail};

/// Bytes as they arrived from one QEMU process.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// Host clock, CLOCK_MONOTONIC.
    pub at_us: u64,
    /// Which QEMU process sent it, in the order in which they connected.
    pub connection: u32,
    /// What it sent.
    pub bytes: Vec<u8>,
}

/// One line of a guest's heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tick {
    /// Host clock when its last byte arrived.
    pub at_us: u64,
    /// Which QEMU process sent its last byte.
    pub connection: u32,
    /// The guest's boot.
    pub boot_id: String,
    /// Rises by one from line to line.
    pub seq: u64,
    /// Pages that did not hold what was written to them.
    pub memory_errors: u64,
    /// The last turn of the disk ring; 0 without a disk.
    pub disk_seq: u64,
    /// Turns that failed or read back something else.
    pub disk_errors: u64,
}

/// All that a guest has printed.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Its heartbeat.
    pub ticks: Vec<Tick>,
    /// Lines that began or ended as a heartbeat but are torn: cut at a hand-over. The index is
    /// that of the tick that follows.
    pub torn: Vec<usize>,
    /// Everything else it printed.
    pub other: Vec<String>,
}

impl History {
    /// Reads the lines out of chunks. A line whose head came from one QEMU process and whose tail
    /// from the next is one line.
    #[must_use]
    pub fn read(chunks: &[Chunk]) -> Self {
        let mut history = Self::default();
        let mut line = Vec::new();
        for chunk in chunks {
            for byte in &chunk.bytes {
                if *byte == b'\n' {
                    history.take(&line, chunk);
                    line.clear();
                } else if *byte != b'\r' {
                    line.push(*byte);
                }
            }
        }
        history
    }

    fn take(&mut self, line: &[u8], chunk: &Chunk) {
        let text = String::from_utf8_lossy(line);
        match parse(&text, chunk) {
            Some(tick) => self.ticks.push(tick),
            None if looks_torn(&text) => self.torn.push(self.ticks.len()),
            None => self.other.push(text.into_owned()),
        }
    }

    /// Fails unless this is one guest that ran once: one boot, no line lost or repeated (but for
    /// one torn at a hand-over), no memory or disk error.
    ///
    /// # Errors
    ///
    /// Says what was wrong, and where.
    pub fn check(&self) -> Result<()> {
        for (at, pair) in self.ticks.windows(2).enumerate() {
            let [before, after] = pair else { continue };
            if before.boot_id != after.boot_id {
                bail!(
                    "the guest booted again: {} at {}, then {}",
                    before.boot_id,
                    before.seq,
                    after.boot_id
                );
            }
            // Of two processes that ran at once, both would go on counting.
            let torn = self.torn.iter().filter(|index| **index == at + 1).count();
            let handed_over = before.connection != after.connection;
            let excused = u64::from(handed_over && torn > 0);
            let step = after.seq.checked_sub(before.seq);
            if step.is_none_or(|step| step == 0 || step > 1 + excused) {
                bail!(
                    "line {} of QEMU process {} is followed by line {} of process {}",
                    before.seq,
                    before.connection,
                    after.seq,
                    after.connection
                );
            }
            if after.connection < before.connection {
                let process = after.connection;
                bail!("QEMU process {process} printed line {} after a later process", after.seq);
            }
        }
        if let Some(tick) = self.ticks.iter().find(|tick| tick.memory_errors > 0) {
            bail!("the guest found {} memory errors by line {}", tick.memory_errors, tick.seq);
        }
        if let Some(tick) = self.ticks.iter().find(|tick| tick.disk_errors > 0) {
            bail!("the guest found {} disk errors by line {}", tick.disk_errors, tick.seq);
        }
        let errors = self.other.iter().filter(|line| line.starts_with("E ")).collect::<Vec<_>>();
        if !errors.is_empty() {
            bail!("the guest complained: {errors:?}");
        }
        Ok(())
    }

    /// Returns the longest time between two lines since `since_us`, in microseconds.
    #[must_use]
    pub fn longest_gap_us(&self, since_us: u64) -> u64 {
        let gaps = self.ticks.windows(2).filter_map(|pair| match pair {
            [before, after] if after.at_us >= since_us => Some(after.at_us - before.at_us),
            _ => None,
        });
        gaps.max().unwrap_or_default()
    }

    /// Returns the time between the last line from the process before and the first line from the
    /// last process, in microseconds: the pause of the last move as an outsider saw it.
    #[must_use]
    pub fn hand_over_us(&self) -> Option<u64> {
        self.ticks.windows(2).rev().find_map(|pair| match pair {
            [before, after] if before.connection != after.connection => {
                Some(after.at_us - before.at_us)
            }
            _ => None,
        })
    }

    /// Returns how many hand-overs cut a line in two.
    #[must_use]
    pub fn torn_lines(&self) -> usize {
        self.torn.len()
    }

    /// Returns the guest's boot id.
    #[must_use]
    pub fn boot_id(&self) -> Option<&str> {
        self.ticks.last().map(|tick| tick.boot_id.as_str())
    }
}

/// Says whether an unreadable line is what a hand-over leaves of a heartbeat.
fn looks_torn(line: &str) -> bool {
    let begins = "T ".starts_with(line) || line.starts_with("T ");
    begins || line.chars().all(|c| c.is_ascii_hexdigit() || c == ' ')
}

/// Reads `T boot counter memory_errors [disk_seq disk_errors]` in hex (the ROM guest) or
/// `T boot seq guest_us disk_seq disk_errors memory_errors` in decimal (the Linux guest).
fn parse(line: &str, chunk: &Chunk) -> Option<Tick> {
    let fields: Vec<&str> = line.split(' ').collect();
    let (boot_id, radix, numbers) = match fields.as_slice() {
        ["T", boot, rest @ ..] if boot.len() == 8 && matches!(rest.len(), 2 | 4) => {
            (boot, 16, rest)
        }
        ["T", boot, rest @ ..] if boot.len() == 32 && rest.len() == 5 => (boot, 10, rest),
        _ => return None,
    };
    let numbers: Option<Vec<u64>> =
        numbers.iter().map(|number| u64::from_str_radix(number, radix).ok()).collect();
    let (seq, memory_errors, disk_seq, disk_errors) = match numbers?.as_slice() {
        [seq, memory_errors] => (*seq, *memory_errors, 0, 0),
        [seq, memory_errors, disk_seq, disk_errors] => {
            (*seq, *memory_errors, *disk_seq, *disk_errors)
        }
        [seq, _, disk_seq, disk_errors, memory_errors] => {
            (*seq, *memory_errors, *disk_seq, *disk_errors)
        }
        _ => return None,
    };
    Some(Tick {
        at_us: chunk.at_us,
        connection: chunk.connection,
        boot_id: (*boot_id).to_owned(),
        seq,
        memory_errors,
        disk_seq,
        disk_errors,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(chunks: &[(u64, u32, &str)]) -> History {
        let chunk = |(at_us, connection, text): &(u64, u32, &str)| Chunk {
            at_us: *at_us,
            connection: *connection,
            bytes: text.as_bytes().to_vec(),
        };
        History::read(&chunks.iter().map(chunk).collect::<Vec<_>>())
    }

    #[test]
    fn a_guest_that_goes_on_passes() {
        let seen =
            history(&[(10, 0, "T 1234abcd 9 0\nT 1234abcd a 0\n"), (95, 1, "T 1234abcd b 0\n")]);
        seen.check().unwrap();
        assert_eq!(seen.hand_over_us(), Some(85));
        assert_eq!(seen.longest_gap_us(0), 85);
    }

    #[test]
    fn a_line_cut_by_the_hand_over_is_one_line() {
        let seen =
            history(&[(1, 0, "T 1234abcd 1 0\nT 1234ab"), (2, 1, "cd 2 0\nT 1234abcd 3 0\n")]);
        seen.check().unwrap();
        assert_eq!(seen.ticks.len(), 3);
        assert_eq!(seen.torn_lines(), 0);
    }

    #[test]
    fn one_torn_line_at_the_hand_over_is_excused() {
        let seen = history(&[(1, 0, "T 1234abcd 1 0\nT 12"), (2, 1, "2 0\nT 1234abcd 3 0\n")]);
        seen.check().unwrap();
        assert_eq!(seen.torn_lines(), 1);
    }

    #[test]
    fn a_lost_line_without_a_hand_over_is_not_excused() {
        assert!(history(&[(1, 0, "T 1234abcd 1 0\nT 1234abcd 3 0\n")]).check().is_err());
    }

    #[test]
    fn a_guest_that_runs_twice_is_seen() {
        let seen = history(&[
            (1, 0, "T 1234abcd 1 0\n"),
            (2, 1, "T 1234abcd 2 0\n"),
            (3, 0, "T 1234abcd 2 0\n"),
        ]);
        assert!(seen.check().is_err());
        let back = history(&[
            (1, 0, "T 1234abcd 1 0\n"),
            (2, 1, "T 1234abcd 2 0\n"),
            (3, 0, "T 1234abcd 3 0\n"),
        ]);
        assert!(back.check().is_err());
    }

    #[test]
    fn a_guest_that_booted_again_is_seen() {
        assert!(
            history(&[(1, 0, "T 1234abcd 1 0\n"), (2, 1, "T 99999999 2 0\n")]).check().is_err()
        );
    }

    #[test]
    fn errors_that_the_guest_counts_are_seen() {
        assert!(history(&[(1, 0, "T 1234abcd 1 1\n")]).check().is_err());
        assert!(history(&[(1, 0, "T 1234abcd 1 0 5 1\n")]).check().is_err());
        let linux = "T 0123456789abcdef0123456789abcdef 1 100 5 0 2\n";
        assert!(history(&[(1, 0, linux)]).check().is_err());
        assert!(history(&[(1, 0, "E module virtio: no\n")]).check().is_err());
    }
}
