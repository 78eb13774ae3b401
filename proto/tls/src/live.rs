//! An identity that follows its files.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use crate::identity::Identity;
use crate::loaded::{CA_FILE, LoadError, Loaded, QemuEnd, Use, file_name, key_name};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// So long before a certificate ends it is said every day.
const SOON_DAYS: u64 = 14;
const DAY: u64 = 86_400;

/// How connections are made and taken.
#[derive(Clone, Debug)]
pub enum Security {
    /// As plain text, since the configuration says so.
    PlainText,
    /// Under an identity.
    Tls(Arc<Live>),
}

impl Security {
    /// Returns the identity, if there is one.
    #[must_use]
    pub const fn live(&self) -> Option<&Arc<Live>> {
        match self {
            Self::PlainText => None,
            Self::Tls(live) => Some(live),
        }
    }
}

/// What a look at the files led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    /// They are what is loaded.
    Same,
    /// They were new, and count from now on.
    Loaded,
    /// They are new and cannot be used; what was loaded before goes on.
    Kept,
}

/// An identity as its files last were when they could be used.
#[derive(Debug)]
pub struct Live {
    dir: PathBuf,
    usage: Use,
    current: RwLock<Arc<Loaded>>,
    /// Rises when other authorities are trusted: what was proven by the earlier ones is not proven.
    trust: AtomicU64,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    stamps: Stamps,
    trouble: Option<String>,
    warned: u64,
}

/// What tells a file from what it was before: inode, size and time of change.
type Stamps = Vec<Option<(u64, u64, i64, i64)>>;

impl Live {
    /// Loads an identity.
    ///
    /// # Errors
    ///
    /// Fails where its files cannot be used now.
    pub fn open(dir: &Path, usage: Use) -> Result<Arc<Self>, LoadError> {
        let stamps = stamps(dir, usage);
        let loaded = Loaded::read(dir, usage, crate::now())?;
        let live = Self {
            dir: dir.to_owned(),
            usage,
            current: RwLock::new(Arc::new(loaded)),
            trust: AtomicU64::new(0),
            seen: Mutex::new(Seen { stamps, trouble: None, warned: 0 }),
        };
        live.warn_of_the_end(crate::now());
        Ok(Arc::new(live))
    }

    /// Returns what is loaded.
    #[must_use]
    pub fn current(&self) -> Arc<Loaded> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns whose it is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.current().identity().clone()
    }

    /// Returns why the files that are there now are not those that are used.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.seen().trouble.clone()
    }

    /// Returns which authorities are trusted: another number, other ones.
    pub(crate) fn trust(&self) -> u64 {
        self.trust.load(Ordering::Acquire)
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the files for as long as it is polled.
    pub async fn follow(self: Arc<Self>) {
        let mut due = tokio::time::interval(LOOK_EVERY);
        due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            due.tick().await;
            let live = self.clone();
            // Files may be on a disk that hangs; a look that was given up is followed by the next.
            if tokio::task::spawn_blocking(move || live.look()).await.is_err() {
                tracing::debug!("a look at the certificates did not end");
            }
        }
    }

    /// Looks at the files once, and takes them up if they are new and whole.
    pub fn look(&self) -> Looked {
        let now = crate::now();
        let stamps = stamps(&self.dir, self.usage);
        {
            let seen = self.seen();
            // What could not be used is tried again: it may have been half written, or too new.
            if seen.stamps == stamps && seen.trouble.is_none() {
                drop(seen);
                self.warn_of_the_end(now);
                return Looked::Same;
            }
        }
        let read = Loaded::read(&self.dir, self.usage, now);
        let checked = read.map_err(|error| chain(&error)).and_then(|loaded| {
            let before = self.identity();
            if *loaded.identity() == before {
                return Ok(loaded);
            }
            Err(format!(
                "{} is of {} now, and this is {before}; restart it if that is meant",
                self.dir.display(),
                loaded.identity()
            ))
        });
        match checked {
            Ok(loaded) => {
                self.take_up(loaded);
                let mut seen = self.seen();
                *seen = Seen { stamps, trouble: None, warned: 0 };
                drop(seen);
                tracing::info!(dir = %self.dir.display(), "certificates loaded anew");
                self.warn_of_the_end(now);
                Looked::Loaded
            }
            Err(trouble) => {
                let mut seen = self.seen();
                if seen.trouble.as_ref() != Some(&trouble) {
                    tracing::warn!(
                        error = trouble,
                        "new certificates cannot be used; the ones loaded before are"
                    );
                }
                seen.stamps = stamps;
                seen.trouble = Some(trouble);
                Looked::Kept
            }
        }
    }

    fn take_up(&self, loaded: Loaded) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let same_trust = current.trusts_as(&loaded);
        *current = Arc::new(loaded);
        drop(current);
        if !same_trust {
            self.trust.fetch_add(1, Ordering::Release);
        }
    }

    /// Says once a day that a certificate ends soon.
    fn warn_of_the_end(&self, now: u64) {
        let first = self.current().expiries().into_iter().min_by_key(|expiry| expiry.not_after);
        let Some(expiry) = first else { return };
        if expiry.not_after > now.saturating_add(SOON_DAYS * DAY) {
            return;
        }
        let mut seen = self.seen();
        if now >= seen.warned.saturating_add(DAY) {
            seen.warned = now;
            tracing::warn!(
                of = expiry.of,
                days_left = expiry.not_after.saturating_sub(now) / DAY,
                dir = %self.dir.display(),
                "a certificate ends soon; make a new one with `vmferry pki renew`"
            );
        }
    }
}

fn stamps(dir: &Path, usage: Use) -> Stamps {
    let client = [CA_FILE.to_owned(), file_name(QemuEnd::Client), key_name(QemuEnd::Client)];
    let server = match usage {
        Use::Client => Vec::new(),
        Use::Daemon => vec![file_name(QemuEnd::Server), key_name(QemuEnd::Server)],
    };
    let names = client.into_iter().chain(server);
    let stamp = |name: String| {
        let found = std::fs::metadata(dir.join(name)).ok()?;
        Some((found.ino(), found.size(), found.ctime(), found.ctime_nsec()))
    };
    names.map(stamp).collect()
}

/// Writes an error with all its causes, as one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
