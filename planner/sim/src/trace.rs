//! What happened, line by line, if anyone wants to know.

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Nothing: the seed gives it all again.
    Nothing,
    /// Every line.
    Everything,
}

/// The history of a world.
#[derive(Debug)]
pub(crate) struct Trace {
    detail: Detail,
    lines: Vec<String>,
}

impl Trace {
    pub(crate) const fn new(detail: Detail) -> Self {
        Self { detail, lines: Vec::new() }
    }

    pub(crate) fn add(&mut self, at_ms: u64, line: impl FnOnce() -> String) {
        match self.detail {
            Detail::Nothing => {}
            Detail::Everything => {
                self.lines.push(format!("{:>4}.{:03} {}", at_ms / 1000, at_ms % 1000, line()));
            }
        }
    }

    pub(crate) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lines)
    }
}
