//! Whether a precopy converges, judged pass by pass.
//!
//! What is left rises with each pass that begins and falls while it is sent: a saw-tooth is no
//! progress. What a pass had to send is: it is what the guest wrote while the one before was sent.

use vmferry_types::Millis;

/// How many passes in a row have to get no smaller. The first of all is the whole of memory.
const PASSES: u32 = 3;
/// How much smaller a pass has to be than the one before, in percent of that one, to be progress.
const SMALLER_PERCENT: u64 = 85;

/// What QEMU says of a transfer at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// The pass it is in, from 1.
    pub pass: u64,
    /// What was sent since the beginning, in bytes.
    pub sent: u64,
    /// How long QEMU expects the guest to stand still if it were stopped now.
    pub downtime: Millis,
    /// How long it may.
    pub limit: Millis,
}

/// Follows one transfer.
#[derive(Clone, Debug, Default)]
pub struct Convergence {
    /// The present pass, and what was sent and when it began.
    pass: Option<(u64, u64, Millis)>,
    /// What the last pass sent.
    last: Option<u64>,
    /// How many in a row were no smaller than the one before.
    level: u32,
    verdict: Option<String>,
}

impl Convergence {
    /// Notes what QEMU says; times are of any clock that does not jump.
    pub fn saw(&mut self, now: Millis, figures: Figures) {
        let Some((pass, sent, since)) = self.pass else {
            self.pass = Some((figures.pass, figures.sent, now));
            return;
        };
        if figures.pass <= pass {
            return;
        }
        self.pass = Some((figures.pass, figures.sent, now));
        // Between two looks several may have gone by.
        let passes = figures.pass.saturating_sub(pass).max(1);
        let crossed = figures.sent.saturating_sub(sent);
        let each = crossed / passes;
        let level = self.last.is_some_and(|last| {
            u128::from(each) * 100 > u128::from(last) * u128::from(SMALLER_PERCENT)
        });
        self.last = Some(each);
        self.level = if level && figures.downtime > figures.limit { self.level + 1 } else { 0 };
        if self.level >= PASSES && self.verdict.is_none() {
            let span = now.less(since).value().max(1);
            let rate = crossed.saturating_mul(1000) / span;
            self.verdict = Some(format!(
                "will not converge: in each pass the guest writes {} MB while as much is sent at {} MB/s, and the {} ms that it may stand still would be {} ms",
                each / 1_000_000,
                rate / 1_000_000,
                figures.limit.value(),
                figures.downtime.value()
            ));
        }
    }

    /// Returns why the transfer will not converge, once that is clear.
    #[must_use]
    pub fn verdict(&self) -> Option<&str> {
        self.verdict.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(passes: &[u64], downtime: u64) -> Convergence {
        let mut followed = Convergence::default();
        let mut sent = 0;
        for (at, size) in passes.iter().enumerate() {
            let pass = u64::try_from(at).unwrap() + 1;
            let figures =
                |sent| Figures { pass, sent, downtime: Millis(downtime), limit: Millis(100) };
            // Seen twice in a pass, as a poll does.
            followed.saw(Millis(pass * 1000), figures(sent));
            followed.saw(Millis(pass * 1000 + 500), figures(sent + size / 2));
            sent += size;
        }
        followed
    }

    #[test]
    fn passes_that_get_no_smaller_do_not_converge() {
        let even = [512_000_000, 64_000_000, 64_000_000, 63_000_000, 64_000_000, 64_000_000];
        let followed = follow(&even, 640);
        assert!(followed.verdict().unwrap().contains("the guest writes 64 MB"), "{followed:?}");
    }

    #[test]
    fn passes_that_get_smaller_are_let_go_on() {
        let falls = [512_000_000, 256_000_000, 128_000_000, 64_000_000, 32_000_000, 16_000_000];
        assert_eq!(follow(&falls, 640).verdict(), None);
    }

    #[test]
    fn a_transfer_that_could_end_in_time_needs_no_verdict() {
        let even = [512_000_000, 6_000_000, 6_000_000, 6_000_000, 6_000_000, 6_000_000];
        assert_eq!(follow(&even, 60).verdict(), None);
    }

    #[test]
    fn what_is_left_in_a_pass_says_nothing() {
        let mut followed = Convergence::default();
        for at in 0..100 {
            let (sent, limit) = (at * 1_000_000, Millis(100));
            followed.saw(Millis(at), Figures { pass: 1, sent, downtime: Millis(9000), limit });
        }
        assert_eq!(followed.verdict(), None);
    }
}
