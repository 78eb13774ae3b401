//! The built `vmferry plan`: its answer, and the exit code that says what kind it is.

#![expect(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn input(case: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../planner/core/tests/cases");
    let text = std::fs::read(Path::new(folder).join(case)).unwrap();
    let case: serde_json::Value = serde_json::from_slice(&text).unwrap();
    case["input"].to_string()
}

fn plan(text: &str, args: &[&str]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .args(["plan", "-"])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn a_plan_that_can_be_carried_out_ends_with_0() {
    let ended = plan(&input("C27-prefer-live-modes.json"), &["-o", "json"]);
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let answer: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!(answer["plan_state"], "PLANNED");
    assert_eq!(answer["assignments"][0]["mode"], "cold");
    assert!(ended.stderr.is_empty(), "{ended:?}");
}

#[test]
fn a_blocked_plan_is_printed_and_ends_with_3() {
    let ended = plan(&input("C11-pinned-to-source.json"), &["-o", "json"]);
    assert_eq!(ended.status.code(), Some(3), "{ended:?}");
    let answer: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!(answer["blockers"][0]["code"], "pinned_to_source");
    let ended = plan(&input("C11-pinned-to-source.json"), &[]);
    let text = String::from_utf8(ended.stdout).unwrap();
    assert!(text.contains("the VM is pinned to the host to be emptied"), "{text}");
}

#[test]
fn a_file_that_is_wrong_or_not_there_ends_with_2_and_the_field() {
    let text = input("C27-prefer-live-modes.json").replace("\"readable\"", "\"redable\"");
    let ended = plan(&text, &[]);
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    assert!(ended.stdout.is_empty());
    let told = String::from_utf8(ended.stderr).unwrap();
    assert!(told.contains("redable"), "{told}");
    let ended = Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .args(["plan", "/nonexistent/fleet.json"])
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
}
