//! Whether a precopy converges, judged pass by pass.
//!
//! What is left rises with each pass that begins and falls while it is sent: a saw-tooth is no
//! progress. What a pass had to send is: it is what the guest wrote while the one before was sent.

use vmferry_types::Millis;

/// How many passes in a row have to get no smaller. The first of all is the whole of memory.
const PASSES: u32 = 3;
/// How much smaller a pass has to be than the one before, in percent of that one, to be progress.
const SMALLER_PERCENT: u64 = 85;
/// How many passes are looked ahead: what needs more of them is not known to end.
const AHEAD: u32 = 64;

/// What QEMU says of a transfer at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// The pass it is in, from 1.
    pub pass: u64,
    /// What was sent since the beginning, in bytes.
    pub sent: u64,
    /// What is left of this pass, in bytes.
    pub remaining: u64,
    /// How fast the guest wrote to its memory until this pass began, in bytes per second.
    pub dirty: u64,
    /// How long QEMU expects the guest to stand still if it were stopped now.
    pub downtime: Millis,
    /// How long it may.
    pub limit: Millis,
    /// Whether the guest is slowed down.
    pub slowed: Slowed,
}

/// How far a guest is slowed down so that its memory converges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slowed {
    /// It is not.
    Not,
    /// It is, and will be more: what it writes now says little of what it writes then.
    More,
    /// As far as it may be.
    Fully,
}

/// What is known of a transfer before its first pass is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Before {
    /// How fast the guest was measured to write to its memory, in bytes per second.
    pub dirty: Option<u64>,
    /// How fast the link is, by a cap or an earlier transfer, in bytes per second.
    pub link: Option<u64>,
}

/// Follows one transfer.
#[derive(Clone, Debug, Default)]
pub struct Convergence {
    before: Before,
    /// The present pass, and what was sent and when it began.
    pass: Option<(u64, u64, Millis)>,
    /// What the last pass sent, and how fast, in bytes and bytes per second.
    last: Option<(u64, u64)>,
    /// How many in a row were no smaller than the one before.
    level: u32,
    verdict: Option<String>,
    forecast: String,
    eta: Option<Millis>,
}

impl Convergence {
    /// Follows a transfer of which something is known beforehand.
    #[must_use]
    pub fn after(before: Before) -> Self {
        Self { before, ..Self::default() }
    }

    /// Notes what QEMU says; times are of any clock that does not jump.
    pub fn saw(&mut self, now: Millis, figures: Figures) {
        let Some((pass, sent, since)) = self.pass else {
            self.pass = Some((figures.pass, figures.sent, now));
            self.forecast = foretell(self.before, figures.limit);
            return;
        };
        if figures.pass > pass {
            self.pass = Some((figures.pass, figures.sent, now));
            // Between two looks several may have gone by.
            let passes = figures.pass.saturating_sub(pass).max(1);
            let crossed = figures.sent.saturating_sub(sent);
            let span = now.less(since).value().max(1);
            self.judge(figures, crossed / passes, crossed.saturating_mul(1000) / span);
        }
        self.eta = if self.verdict.is_some() { None } else { self.remains(now, figures) };
    }

    /// Judges at the beginning of a pass, by what the one before sent.
    fn judge(&mut self, figures: Figures, each: u64, link: u64) {
        let level = self.last.is_some_and(|(last, _)| {
            u128::from(each) * 100 > u128::from(last) * u128::from(SMALLER_PERCENT)
        });
        self.last = Some((each, link));
        let counts = level && figures.downtime > figures.limit && figures.slowed != Slowed::More;
        self.level = if counts { self.level + 1 } else { 0 };
        let rates = format!("dirties {} over a {} link", rate(figures.dirty), rate(link));
        let (downtime, limit) = (figures.downtime.value(), figures.limit.value());
        if self.level >= PASSES && self.verdict.is_none() {
            self.verdict = Some(format!(
                "will not converge: {rates}; its passes get no smaller than {} MB, and it would stand still for {downtime} ms where it may for {limit} ms",
                each / 1_000_000,
            ));
        }
        self.forecast = match &self.verdict {
            Some(verdict) => verdict.clone(),
            None if figures.downtime <= figures.limit => format!("fits in {downtime} ms: {rates}"),
            None if figures.slowed == Slowed::More => {
                format!("is slowed down until it converges: {rates}")
            }
            None if smaller(figures.dirty, link) => format!("converges: {rates}"),
            None => format!("does not converge so far: {rates}"),
        };
    }

    /// Returns how long it takes until what is left fits: this pass, and each after it sends what is
    /// written meanwhile.
    fn remains(&self, now: Millis, figures: Figures) -> Option<Millis> {
        let (_, sent, since) = self.pass?;
        let (dirty, link) = match self.last {
            Some((_, link)) => (figures.dirty, link),
            None => {
                let span = now.less(since).value();
                let crossed = figures.sent.saturating_sub(sent);
                let link = crossed.saturating_mul(1000).checked_div(span).unwrap_or(0);
                (self.before.dirty?, link)
            }
        };
        if link == 0 {
            return None;
        }
        let (dirty, link) = (u128::from(dirty), u128::from(link));
        let fits = link * u128::from(figures.limit.value()) / 1000;
        let mut left = u128::from(figures.remaining);
        let mut total = left * 1000 / link;
        let mut pass = 0;
        left = left * dirty / link;
        while left > fits {
            pass += 1;
            if dirty >= link || pass > AHEAD {
                return None;
            }
            total += left * 1000 / link;
            left = left * dirty / link;
        }
        u64::try_from(total).ok().map(Millis)
    }

    /// Returns why the transfer will not converge, once that is clear.
    #[must_use]
    pub fn verdict(&self) -> Option<&str> {
        self.verdict.as_deref()
    }

    /// Returns what is expected of the transfer, in words; empty before anything was seen of it.
    #[must_use]
    pub fn forecast(&self) -> &str {
        &self.forecast
    }

    /// Returns how long it takes until the guest can stand still for no longer than it may. `None` if
    /// that is not known, or will not be.
    #[must_use]
    pub const fn eta(&self) -> Option<Millis> {
        self.eta
    }
}

/// Says what is to be expected before anything has crossed. What is not known is said, not guessed.
#[must_use]
pub fn foretell(before: Before, limit: Millis) -> String {
    match (before.dirty, before.link) {
        (Some(dirty), Some(link)) if smaller(dirty, link) => {
            // The last pass sends what is written while the one before it sends as much as fits.
            let last = u128::from(limit.value()) * u128::from(dirty) / u128::from(link.max(1));
            format!(
                "expected to fit in {} ms: dirties {} over a {} link",
                last.max(1),
                rate(dirty),
                rate(link)
            )
        }
        (Some(dirty), Some(link)) => {
            format!("not expected to converge: dirties {} over a {} link", rate(dirty), rate(link))
        }
        (Some(dirty), None) => {
            format!("not known yet: dirties {}, how fast the link is nobody has seen", rate(dirty))
        }
        (None, Some(link)) => {
            format!(
                "not known yet: over a {} link, how fast the guest dirties nobody has seen",
                rate(link)
            )
        }
        (None, None) => "not known yet: its first pass has to be over".to_owned(),
    }
}

/// Says whether passes get smaller by enough that they are progress.
fn smaller(dirty: u64, link: u64) -> bool {
    u128::from(dirty) * 100 <= u128::from(link) * u128::from(SMALLER_PERCENT)
}

fn rate(bytes: u64) -> String {
    if bytes >= 10_000_000 {
        format!("{} MB/s", bytes / 1_000_000)
    } else {
        format!("{}.{} MB/s", bytes / 1_000_000, bytes / 100_000 % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(pass: u64, sent: u64, downtime: u64) -> Figures {
        Figures {
            pass,
            sent,
            remaining: 0,
            dirty: 64_000_000,
            downtime: Millis(downtime),
            limit: Millis(100),
            slowed: Slowed::Not,
        }
    }

    fn follow_as(passes: &[u64], downtime: u64, slowed: Slowed) -> Convergence {
        let mut followed = Convergence::default();
        let mut sent = 0;
        for (at, size) in passes.iter().enumerate() {
            let pass = u64::try_from(at).unwrap() + 1;
            let seen = |sent| Figures { slowed, ..figures(pass, sent, downtime) };
            // Seen twice in a pass, as a poll does.
            followed.saw(Millis(pass * 1000), seen(sent));
            followed.saw(Millis(pass * 1000 + 500), seen(sent + size / 2));
            sent += size;
        }
        followed
    }

    fn follow(passes: &[u64], downtime: u64) -> Convergence {
        follow_as(passes, downtime, Slowed::Not)
    }

    const EVEN: [u64; 6] =
        [512_000_000, 64_000_000, 64_000_000, 63_000_000, 64_000_000, 64_000_000];

    #[test]
    fn passes_that_get_no_smaller_do_not_converge() {
        let followed = follow(&EVEN, 640);
        let verdict = followed.verdict().unwrap();
        assert!(
            verdict.starts_with("will not converge: dirties 64 MB/s over a 64 MB/s link"),
            "{verdict}"
        );
        assert_eq!(followed.forecast(), verdict);
        assert_eq!(followed.eta(), None);
    }

    #[test]
    fn a_guest_that_is_being_slowed_down_is_not_judged_before_that_is_over() {
        assert_eq!(follow_as(&EVEN, 640, Slowed::More).verdict(), None);
        assert!(follow_as(&EVEN, 640, Slowed::Fully).verdict().is_some());
    }

    #[test]
    fn passes_that_get_smaller_are_let_go_on() {
        let falls = [512_000_000, 256_000_000, 128_000_000, 64_000_000, 32_000_000, 16_000_000];
        assert_eq!(follow(&falls, 640).verdict(), None);
    }

    #[test]
    fn a_transfer_that_could_end_in_time_needs_no_verdict() {
        let even = [512_000_000, 6_000_000, 6_000_000, 6_000_000, 6_000_000, 6_000_000];
        let followed = follow(&even, 60);
        assert_eq!(followed.verdict(), None);
        assert!(followed.forecast().starts_with("fits in 60 ms: "), "{}", followed.forecast());
    }

    #[test]
    fn what_is_left_in_a_pass_says_nothing() {
        let mut followed = Convergence::default();
        for at in 0..100 {
            followed.saw(Millis(at), figures(1, at * 1_000_000, 9000));
        }
        assert_eq!(followed.verdict(), None);
        assert_eq!(followed.forecast(), "not known yet: its first pass has to be over");
    }

    #[test]
    fn the_time_left_counts_the_passes_that_are_still_to_come() {
        let mut followed = Convergence::default();
        let seen = |pass, sent, remaining| Figures {
            remaining,
            dirty: 50_000_000,
            ..figures(pass, sent, 500)
        };
        followed.saw(Millis(0), seen(1, 0, 100_000_000));
        assert_eq!(followed.eta(), None);
        // A second for the first pass; then half, a quarter and an eighth of that: what is written
        // in the last of them can cross within the limit.
        followed.saw(Millis(1000), seen(2, 100_000_000, 50_000_000));
        assert_eq!(followed.eta(), Some(Millis(500 + 250 + 125)));
        followed.saw(Millis(1250), seen(2, 125_000_000, 25_000_000));
        assert_eq!(followed.eta(), Some(Millis(250 + 125)));
    }

    #[test]
    fn what_is_known_beforehand_is_told_and_what_is_not_is_said() {
        let told = |dirty, link| foretell(Before { dirty, link }, Millis(300));
        assert_eq!(
            told(Some(900_000_000), Some(300_000_000)),
            "not expected to converge: dirties 900 MB/s over a 300 MB/s link"
        );
        assert_eq!(
            told(Some(240_000_000), Some(300_000_000)),
            "expected to fit in 240 ms: dirties 240 MB/s over a 300 MB/s link"
        );
        assert!(told(Some(1_500_000), None).starts_with("not known yet: dirties 1.5 MB/s"));
        assert!(told(None, Some(300_000_000)).starts_with("not known yet: over a 300 MB/s link"));
    }
}
