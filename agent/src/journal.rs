//! The journal on the disk: one file a VM, replaced as a whole.
//!
//! A write is a new file, flushed, renamed over the old one, and the directory flushed: after it
//! returned, a power cut finds the new record, and before, the old one.
//!
//! A file named `host` marks a journal that was kept. Where it is missing the journal is new or was
//! lost, and what is not in it proves nothing (rule R3).

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use vmferry_agent_core::journal::{RecordError, VmRecord};
use vmferry_types::{HostId, VmId};

/// The marker's name.
const MARKER: &str = "host";
/// The directory of the records.
const RECORDS: &str = "vms";

/// The journal could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JournalError {
    #[error("{operation} {path}", path = path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("use the record of {vm}")]
    Record { vm: VmId, source: RecordError },
    #[error(
        "the journal in {path} is of host {found}, this agent is {expected}: give this host a state_dir of its own",
        path = path.display()
    )]
    OtherHost { path: PathBuf, found: String, expected: HostId },
    #[error("the journal's writer was interrupted")]
    Interrupted(#[source] tokio::task::JoinError),
}

/// What was found at the start.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) records: Vec<VmRecord>,
    /// Records that cannot be read: nothing is known of these VMs.
    pub(crate) broken: Vec<(VmId, JournalError)>,
    pub(crate) kept: Kept,
}

/// Whether the journal was kept since this host's first day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Whole,
    /// New or lost: what is not in it proves nothing.
    NewOrLost,
}

/// The journal of one host.
#[derive(Clone, Debug)]
pub(crate) struct Journal {
    dir: PathBuf,
}

impl Journal {
    /// Opens the journal and reads it.
    pub(crate) fn open(state_dir: &Path, host: &HostId) -> Result<(Self, Found), JournalError> {
        let dir = state_dir.join(RECORDS);
        fs::create_dir_all(&dir).map_err(|source| failed("create", &dir, source))?;
        let marker = state_dir.join(MARKER);
        let kept = match fs::read_to_string(&marker) {
            Ok(found) if found.trim() == host.as_str() => Kept::Whole,
            Ok(found) => {
                let (path, found) = (state_dir.to_owned(), found.trim().to_owned());
                return Err(JournalError::OtherHost { path, found, expected: host.clone() });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Kept::NewOrLost,
            Err(source) => return Err(failed("read", &marker, source)),
        };
        let journal = Self { dir };
        let found = journal.read_all(kept)?;
        Ok((journal, found))
    }

    fn read_all(&self, kept: Kept) -> Result<Found, JournalError> {
        let (mut records, mut broken) = (Vec::new(), Vec::new());
        let entries =
            fs::read_dir(&self.dir).map_err(|source| failed("list", &self.dir, source))?;
        for entry in entries {
            let path = entry.map_err(|source| failed("list", &self.dir, source))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some(vm) = name.strip_suffix(".json").and_then(|stem| stem.parse::<VmId>().ok())
            else {
                // What a crash left of a write, or somebody's copy: no record.
                continue;
            };
            let read = fs::read(&path).map_err(|source| failed("read", &path, source));
            let record = read.and_then(|bytes| {
                VmRecord::from_json(&bytes).map_err(|source| JournalError::Record { vm, source })
            });
            match record {
                Ok(record) if record.vm == vm => records.push(record),
                Ok(_) => {
                    let source = RecordError::Contradiction("it is of another VM than its file");
                    broken.push((vm, JournalError::Record { vm, source }));
                }
                Err(error) => broken.push((vm, error)),
            }
        }
        Ok(Found { records, broken, kept })
    }

    /// Writes a record; returns once a power cut cannot undo it.
    pub(crate) async fn write(&self, record: &VmRecord) -> Result<(), JournalError> {
        let bytes =
            record.to_json().map_err(|source| JournalError::Record { vm: record.vm, source })?;
        let (dir, name) = (self.dir.clone(), format!("{}.json", record.vm));
        tokio::task::spawn_blocking(move || replace(&dir, &name, &bytes))
            .await
            .map_err(JournalError::Interrupted)?
    }

    /// Marks the journal as kept from now on.
    pub(crate) fn mark_kept(state_dir: &Path, host: &HostId) -> Result<(), JournalError> {
        replace(state_dir, MARKER, host.as_str().as_bytes())
    }

    /// Returns where a VM's record is.
    pub(crate) fn path(&self, vm: VmId) -> PathBuf {
        self.dir.join(format!("{vm}.json"))
    }

    /// Removes the record of a VM that nothing was ever done to.
    pub(crate) fn remove(&self, vm: VmId) -> Result<(), JournalError> {
        let path = self.path(vm);
        let removed = match fs::remove_file(&path) {
            // It was never written.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.and_then(|()| File::open(&self.dir)?.sync_all()),
        };
        removed.map_err(|source| failed("remove", &path, source))
    }

    /// Puts a broken record aside, so that a new one can be written and the old one be looked at.
    pub(crate) fn set_aside(&self, vm: VmId) -> Result<(), JournalError> {
        let path = self.path(vm);
        let aside = self.dir.join(format!("{vm}.broken"));
        fs::rename(&path, &aside).map_err(|source| failed("set aside", &path, source))
    }
}

fn replace(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), JournalError> {
    let (new, path) = (dir.join(format!("{name}.new")), dir.join(name));
    let write = || -> io::Result<()> {
        let mut file = File::create(&new)?;
        file.write_all(bytes)?;
        file.sync_data()?;
        fs::rename(&new, &path)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(|source| failed("write", &path, source))
}

fn failed(operation: &'static str, path: &Path, source: io::Error) -> JournalError {
    JournalError::Io { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostId {
        "a".parse().unwrap()
    }

    #[tokio::test]
    async fn a_record_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, found) = Journal::open(dir.path(), &host()).unwrap();
        assert_eq!(found.kept, Kept::NewOrLost);
        Journal::mark_kept(dir.path(), &host()).unwrap();
        let record = VmRecord::new(VmId::from_u128(1));
        journal.write(&record).await.unwrap();
        let (_, found) = Journal::open(dir.path(), &host()).unwrap();
        assert_eq!((found.records, found.kept), (vec![record], Kept::Whole));
    }

    #[tokio::test]
    async fn a_broken_record_is_named_and_the_others_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, _) = Journal::open(dir.path(), &host()).unwrap();
        journal.write(&VmRecord::new(VmId::from_u128(1))).await.unwrap();
        let broken = VmId::from_u128(2);
        fs::write(dir.path().join(RECORDS).join(format!("{broken}.json")), b"{").unwrap();
        let (journal, found) = Journal::open(dir.path(), &host()).unwrap();
        assert_eq!((found.records.len(), found.broken[0].0), (1, broken));
        journal.set_aside(broken).unwrap();
        assert!(Journal::open(dir.path(), &host()).unwrap().1.broken.is_empty());
    }

    #[test]
    fn a_journal_of_another_host_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        Journal::mark_kept(dir.path(), &"b".parse().unwrap()).unwrap();
        let error = Journal::open(dir.path(), &host()).unwrap_err();
        assert!(matches!(error, JournalError::OtherHost { .. }));
    }

    #[tokio::test]
    async fn what_a_crash_left_of_a_write_is_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, _) = Journal::open(dir.path(), &host()).unwrap();
        let vm = VmId::from_u128(1);
        journal.write(&VmRecord::new(vm)).await.unwrap();
        fs::write(dir.path().join(RECORDS).join(format!("{vm}.json.new")), b"{").unwrap();
        let (_, found) = Journal::open(dir.path(), &host()).unwrap();
        assert_eq!((found.records.len(), found.broken.len()), (1, 0));
    }
}
