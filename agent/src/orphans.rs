//! What is left here of VMs that are not this host's, or that no journal knows.
//!
//! All of it is named in the report, and none of it is removed by itself: a guest may be all that
//! is left of a VM, a source may still be needed, and whoever knows better gives the word.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use vmferry_agent_core::journal::{Part, VmRecord};
use vmferry_proto::v1;
use vmferry_types::VmId;

use crate::agent::Agent;
use crate::live::{Knowledge, Sight};
use crate::process::{QemuFound, Scan};
use crate::vm::VmHandle;
use crate::{clock, network};

/// How many are named; more are the same news.
const ORPHANS_MAX: usize = 256;
/// A directory that was touched so lately may be about to be used or removed.
const SETTLED: Duration = Duration::from_secs(10);

/// What belongs to a launch that the journal knows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Own {
    pub(crate) dirs: BTreeSet<PathBuf>,
    pub(crate) taps: BTreeSet<String>,
}

impl Own {
    /// Returns what belongs to the launches that the journal knows now.
    pub(crate) fn of(agent: &Agent) -> Self {
        let mut own = Self::default();
        for vm in agent.vms() {
            if let Some(written) = vm.shared.record.borrow().process() {
                own.dirs.insert((&written.dir).into());
                own.taps.extend(written.taps.iter().cloned());
            }
        }
        own
    }

    /// Adds what belongs to others.
    pub(crate) fn extend(&mut self, other: Self) {
        self.dirs.extend(other.dirs);
        self.taps.extend(other.taps);
    }
}

/// Names what is left of the VMs that the journal knows.
pub(crate) fn of_records(agent: &Agent, vms: &[VmHandle]) -> Vec<v1::Orphan> {
    let told = agent.told();
    let now = clock::monotonic();
    let of = |vm: &VmHandle| {
        let record = vm.shared.record.borrow().clone();
        let sight = vm.shared.sight.borrow().clone();
        if sight.knowledge == Knowledge::Unreadable {
            let path = agent.journal.path(record.vm);
            let detail = format!("{} cannot be read: {}", path.display(), sight.trouble);
            return Some(orphan(record.vm, String::new(), "journal", detail));
        }
        let word = told.of(record.vm)?;
        let why = word.disowns(&record, now)?;
        let (kind, what) = remains(&record, &sight);
        Some(v1::Orphan {
            generation: word.generation.value(),
            ..orphan(record.vm, record.name.clone(), kind, format!("{what}; {why}"))
        })
    };
    vms.iter().filter_map(of).collect()
}

/// Says what a record has of a VM.
fn remains(record: &VmRecord, sight: &Sight) -> (&'static str, String) {
    let (process, what) = match &record.part {
        Part::Absent | Part::Stopped { .. } => {
            return ("definition", "its definition is here, stopped".to_owned());
        }
        Part::Running { process, .. } => (process, "a QEMU process"),
        Part::Receiver { process, .. } => (process, "a receiver"),
    };
    let generation = process.generation;
    match &sight.gone {
        Some(gone) => (
            "journal",
            format!(
                "{what} of generation {generation} was here and {}: {}",
                gone.ended, process.dir
            ),
        ),
        None => {
            let pid = sight.identity.as_ref().or(process.identity.as_ref());
            let pid =
                pid.map_or_else(String::new, |identity| format!(" with pid {}", identity.pid));
            ("process", format!("{what} of generation {generation} is here{pid}: {}", process.dir))
        }
    }
}

fn orphan(vm: VmId, name: String, kind: &str, detail: String) -> v1::Orphan {
    v1::Orphan {
        vm_id: vm.to_string(),
        vm_name: name,
        kind: kind.to_owned(),
        detail,
        generation: 0,
    }
}

/// Names QEMU processes and directories of launches that no record names. Blocks.
pub(crate) fn of_launches(run_dir: &Path, own: &BTreeSet<PathBuf>, scan: &Scan) -> Vec<v1::Orphan> {
    let unowned = |qemu: &&QemuFound| qemu.dir.as_ref().is_some_and(|dir| !own.contains(dir));
    let ours = |qemu: &&QemuFound| {
        qemu.dir.as_deref().and_then(Path::parent).is_some_and(|parent| parent == run_dir)
    };
    let mut found: Vec<v1::Orphan> =
        scan.qemus.iter().filter(unowned).filter(ours).map(of_process).collect();
    let running: BTreeSet<_> = scan.qemus.iter().filter_map(|qemu| qemu.dir.as_deref()).collect();
    let entries = fs::read_dir(run_dir).into_iter().flatten().flatten();
    let dirs = entries.filter(settled).map(|entry| entry.path()).filter(|path| path.is_dir());
    for dir in dirs.filter(|dir| !own.contains(dir) && !running.contains(dir.as_path())) {
        found.push(v1::Orphan {
            kind: "launch_dir".to_owned(),
            detail: format!(
                "{}: no record names this launch, and no QEMU of it runs",
                dir.display()
            ),
            ..v1::Orphan::default()
        });
    }
    found
}

/// Names a QEMU process that no record names.
pub(crate) fn of_process(qemu: &QemuFound) -> v1::Orphan {
    let dir = qemu.dir.as_deref().map_or_else(String::new, |dir| format!(" in {}", dir.display()));
    v1::Orphan {
        vm_id: qemu.uuid.map(|uuid| uuid.to_string()).unwrap_or_default(),
        vm_name: qemu.name.clone().unwrap_or_default(),
        kind: "process".to_owned(),
        detail: format!("QEMU {}{dir} runs, and no record names it", qemu.identity),
        generation: 0,
    }
}

/// Says whether nobody is about to use or remove a directory.
fn settled(entry: &fs::DirEntry) -> bool {
    let modified = entry.metadata().and_then(|metadata| metadata.modified());
    modified.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age >= SETTLED))
}

/// Names taps of ours that belong to no launch and that nobody has open.
pub(crate) fn of_taps(own: &BTreeSet<String>, links: &network::Links) -> Vec<v1::Orphan> {
    let left = links.idle_taps.iter().filter(|tap| !own.contains(*tap));
    left.map(|tap| v1::Orphan {
        kind: "tap".to_owned(),
        detail: format!("{tap}: no launch has this interface, and nobody has it open"),
        ..v1::Orphan::default()
    })
    .collect()
}

/// Returns as many as are worth naming.
pub(crate) fn bounded(mut orphans: Vec<v1::Orphan>) -> Vec<v1::Orphan> {
    orphans.truncate(ORPHANS_MAX);
    orphans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessIdentity;

    fn qemu(dir: Option<&Path>) -> QemuFound {
        QemuFound {
            identity: ProcessIdentity { pid: 7, start_time: 8, boot_id: "b".to_owned() },
            uuid: Some(uuid::Uuid::from_u128(1)),
            name: Some("web1".to_owned()),
            dir: dir.map(Path::to_owned),
        }
    }

    #[test]
    fn launches_that_no_record_names_are_left_over() {
        let run = tempfile::tempdir().unwrap();
        let [known, alive, left, fresh] =
            ["known", "alive", "left", "fresh"].map(|name| run.path().join(name));
        for dir in [&known, &alive, &left, &fresh] {
            fs::create_dir(dir).unwrap();
            if *dir != fresh {
                let old = SystemTime::now() - SETTLED - SETTLED;
                fs::File::open(dir).unwrap().set_modified(old).unwrap();
            }
        }
        fs::write(run.path().join("host"), "a").unwrap();
        let scan = Scan {
            qemus: vec![qemu(Some(&known)), qemu(Some(&alive)), qemu(None)],
            ..Scan::default()
        };
        let found = of_launches(run.path(), &BTreeSet::from([known]), &scan);
        let kinds: Vec<_> = found.iter().map(|orphan| orphan.kind.as_str()).collect();
        assert_eq!(kinds, ["process", "launch_dir"]);
        assert_eq!(found[0].vm_name, "web1");
        assert!(found[0].detail.contains(&alive.display().to_string()));
        assert!(found[1].detail.contains(&left.display().to_string()));
    }

    #[test]
    fn a_tap_without_a_launch_is_left_over() {
        let links = network::Links {
            bridges: Vec::new(),
            idle_taps: vec!["vf00000000001".to_owned(), "vf00000000002".to_owned()],
        };
        let found = of_taps(&BTreeSet::from(["vf00000000001".to_owned()]), &links);
        assert_eq!(found.len(), 1);
        assert!(found[0].detail.starts_with("vf00000000002"));
    }
}
