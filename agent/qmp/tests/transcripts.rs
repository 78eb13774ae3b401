//! Real conversations, replayed.
//!
//! The recordings come from `transcripts/record`. What the session and the
//! types make of each stands in a text file beside it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "what helps a test fails as the test does")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use expect_test::expect_file;
use serde::Deserialize as _;
use serde_json::Value;
use vmferry_qmp::command::{
    QueryBalloon, QueryBlock, QueryBlockJobs, QueryCpuModelExpansion, QueryCpusFast, QueryJobs,
    QueryMemorySizeSummary, QueryMigrate, QueryMigrateCapabilities, QueryMigrateParameters,
    QueryName, QueryNamedBlockNodes, QueryStatus, QueryUuid, QueryYank,
};
use vmferry_qmp::{Band, Command, EventView, Output, RequestId, Session};

fn transcripts() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transcripts");
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "qmp"));
    paths.sort();
    assert!(paths.len() >= 10, "the recordings are there");
    paths
}

/// Plays a recording into a session, `piece` bytes at a time, and returns
/// what came of it.
fn replay(text: &str, piece: usize) -> String {
    let mut session = Session::new();
    let mut commands = BTreeMap::new();
    let mut told = String::new();
    for line in text.lines() {
        if let Some(sent) = line.strip_prefix("> ") {
            let sent: Value = serde_json::from_str(sent).unwrap();
            request(&mut session, &sent, &mut commands);
            let transmit = session.poll_transmit().unwrap();
            let ours: Value = serde_json::from_slice(&transmit.line).unwrap();
            assert_eq!(ours, sent, "the session sends what was sent");
        } else if let Some(came) = line.strip_prefix("< ") {
            for bytes in format!("{came}\r\n").as_bytes().chunks(piece) {
                session.handle_bytes(bytes).unwrap();
            }
            while let Some(output) = session.poll_output() {
                writeln!(told, "{}", describe(&output, &commands)).unwrap();
            }
        }
    }
    writeln!(told, "unanswered: {}", session.waiting()).unwrap();
    writeln!(told, "end: {}", session.handle_eof()).unwrap();
    told
}

fn request(session: &mut Session, sent: &Value, commands: &mut BTreeMap<RequestId, String>) {
    let (band, verb) = match sent.get("exec-oob") {
        Some(command) => (Band::OutOf, command),
        None => (Band::In, &sent["execute"]),
    };
    let command = verb.as_str().unwrap();
    if command == "qmp_capabilities" {
        return; // The session sends this one by itself.
    }
    let arguments = sent.get("arguments").cloned().unwrap_or_default();
    let id = session.request(band, command, &arguments).unwrap();
    commands.insert(id, command.to_owned());
}

fn describe(output: &Output, commands: &BTreeMap<RequestId, String>) -> String {
    match output {
        Output::Ready(greeting) => format!("ready: {:?}", greeting.version),
        Output::Event(event) => {
            assert!(event.at_us.is_some());
            let view = event.view();
            if view == EventView::Other {
                format!("event {}: {}", event.name, event.data)
            } else {
                format!("event {}: {view:?}", event.name)
            }
        }
        Output::Reply { id, result: Ok(value) } => {
            let command = &commands[id];
            format!("reply {command}: {}", typed(command, value))
        }
        Output::Reply { id, result: Err(refused) } => {
            format!("refused {}: {refused}", commands[id])
        }
        Output::Stray(stray) => format!("stray: {stray:?}"),
    }
}

/// Reads a reply as its type and shows it, without what differs each time.
fn typed(command: &str, value: &Value) -> String {
    match command {
        QueryStatus::NAME => show::<QueryStatus>(value),
        QueryMigrate::NAME => show::<QueryMigrate>(value),
        QueryMigrateCapabilities::NAME => show::<QueryMigrateCapabilities>(value),
        QueryMigrateParameters::NAME => show::<QueryMigrateParameters>(value),
        QueryName::NAME => show::<QueryName>(value),
        QueryUuid::NAME => show::<QueryUuid>(value),
        QueryCpusFast::NAME => show::<QueryCpusFast>(value),
        QueryMemorySizeSummary::NAME => show::<QueryMemorySizeSummary>(value),
        QueryCpuModelExpansion::NAME => show::<QueryCpuModelExpansion>(value),
        QueryBalloon::NAME => show::<QueryBalloon>(value),
        QueryYank::NAME => show::<QueryYank>(value),
        QueryJobs::NAME => show::<QueryJobs>(value),
        QueryBlockJobs::NAME => show::<QueryBlockJobs>(value),
        QueryBlock::NAME => show::<QueryBlock>(value),
        QueryNamedBlockNodes::NAME => show::<QueryNamedBlockNodes>(value),
        _ => value.to_string(),
    }
}

fn show<C: Command>(value: &Value) -> String
where
    C::Ok: std::fmt::Debug,
{
    let reply = C::Ok::deserialize(value).unwrap_or_else(|error| panic!("{}: {error}", C::NAME));
    format!("{reply:?}")
}

#[test]
fn every_recording_reads_as_it_did() {
    for path in transcripts() {
        let told = replay(&fs::read_to_string(&path).unwrap(), usize::MAX);
        expect_file![path.with_extension("txt")].assert_eq(&told);
    }
}

#[test]
fn it_does_not_matter_how_the_bytes_are_cut() {
    for path in transcripts() {
        let text = fs::read_to_string(&path).unwrap();
        let whole = replay(&text, usize::MAX);
        for piece in [1, 2, 7, 64] {
            assert_eq!(replay(&text, piece), whole, "{} in pieces of {piece}", path.display());
        }
    }
}
