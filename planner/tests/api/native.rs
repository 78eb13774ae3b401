//! Moves that are made step by step, and wait for their operator at each gate.

use vmferry_proto::v1;

use crate::bench::{Bench, until};

const RECEIVERS: &str = "/api/migration/receivers";

fn native(what: &str) -> String {
    format!("/api/vms/web1/migration/native/{what}")
}

/// Waits until the VM's migration waits at a gate.
async fn at_gate(bench: &Bench, gate: &str) -> v1::Migration {
    loop {
        let seen = bench.planner.newest_migration("web1").await.unwrap();
        if seen.waits_at_gate == gate {
            return seen;
        }
        assert!(seen.completed.is_empty(), "{seen:#?}");
        tokio::task::yield_now().await;
    }
}

async fn prepared(bench: &Bench, body: &str) -> String {
    let (status, prepared) = bench.http("POST", &native("prepare-receiver"), body).await;
    assert_eq!(status, 202, "{prepared}");
    prepared["id"].as_str().unwrap().to_owned()
}

async fn opens(bench: &Bench, id: &str, gate: &str) -> Result<v1::Migration, String> {
    let asked = v1::OpenGateRequest {
        id: id.to_owned(),
        gate: gate.to_owned(),
        ..v1::OpenGateRequest::default()
    };
    bench.planner.open_gate(&asked).await.map_err(|error| format!("{}: {error}", error.code()))
}

#[tokio::test]
async fn a_move_is_made_step_by_step_over_rest() {
    let bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let id = prepared(&bench, r#"{"target_host": "b"}"#).await;
    let seen = at_gate(&bench, "start").await;
    assert_eq!((seen.phase.as_str(), seen.gates.len()), ("admitted", 3));
    assert!(!seen.gate_expires.is_empty());
    assert_eq!(bench.world.running(&vm.id), ["a"]);
    let commands = bench.world.commands().len();
    let activate = format!("{RECEIVERS}/{id}/activate");
    let (status, early) = bench.http("POST", &activate, "{}").await;
    assert_eq!((status, early["code"].as_str()), (409, Some("not_at_gate")), "{early}");
    assert_eq!(bench.world.commands().len(), commands, "nothing is sent while it waits");
    let (status, _) = bench.http("POST", &native("start"), "{}").await;
    assert_eq!(status, 202);
    at_gate(&bench, "switchover").await;
    // The word that was given already is answered with what came of it.
    let (status, again) = bench.http("POST", &native("start"), "{}").await;
    assert_eq!((status, again["waits_at_gate"].as_str()), (202, Some("switchover")), "{again}");
    let (_, status) = bench.http("GET", &native("status"), "").await;
    assert_eq!(status["phase"], "captured");
    let (_, state) = bench.http("GET", &native("network-state"), "").await;
    assert_eq!(state["hosts"].as_array().unwrap().len(), 2, "{state}");
    let (status, _) = bench.http("POST", &activate, "{}").await;
    assert_eq!(status, 202);
    let done = bench.ended(&id).await;
    assert_eq!(done.state, "completed", "{done:#?}");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
    let (status, _) = bench.http("POST", &activate, "{}").await;
    assert_eq!(status, 202, "given twice, it is answered with the end");
}

#[tokio::test]
async fn a_planner_that_dies_at_each_gate_waits_there_again() {
    let mut bench = Bench::new(&["a", "b"]).await;
    let vm = bench.start("web1", 1, "a").await;
    let id = prepared(&bench, r#"{"target_host": "b"}"#).await;
    for gate in ["start", "switchover", "commit"] {
        at_gate(&bench, gate).await;
        bench = bench.restart().await;
        bench.report(&["a", "b"]).await;
        let seen = at_gate(&bench, gate).await;
        assert_eq!(seen.id, id);
        opens(&bench, &id, gate).await.unwrap();
    }
    let done = bench.ended(&id).await;
    assert_eq!(done.state, "completed", "{done:#?}");
    assert_eq!(bench.world.running(&vm.id), ["b"]);
}

#[tokio::test]
async fn a_gate_is_opened_only_where_it_is_waited_at() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let body = r#"{"target_host": "b", "gates": ["start", "commit"]}"#;
    let id = prepared(&bench, body).await;
    at_gate(&bench, "start").await;
    for (gate, code) in [
        ("commit", "not_at_gate"),
        ("switchover", "not_at_gate"),
        ("all", "not_at_gate"),
        ("door", "invalid"),
    ] {
        let refused = opens(&bench, &id, gate).await.unwrap_err();
        assert!(refused.starts_with(code), "{gate}: {refused}");
    }
    opens(&bench, &id, "start").await.unwrap();
    at_gate(&bench, "commit").await;
    opens(&bench, &id, "start").await.unwrap();
    opens(&bench, &id, "commit").await.unwrap();
    assert_eq!(bench.ended(&id).await.state, "completed");
    opens(&bench, &id, "commit").await.unwrap();
}

#[tokio::test]
async fn a_receiver_that_is_taken_back_at_any_gate_leaves_the_guest_where_it_was() {
    for gate in ["start", "switchover", "commit"] {
        let bench = Bench::new(&["a", "b"]).await;
        let vm = bench.start("web1", 1, "a").await;
        let body = format!(r#"{{"target_host": "b", "gates": ["{gate}"]}}"#);
        let id = prepared(&bench, &body).await;
        at_gate(&bench, gate).await;
        let (status, _) = bench.http("DELETE", &format!("{RECEIVERS}/{id}"), "").await;
        assert_eq!(status, 202);
        let ended = bench.ended(&id).await;
        assert_eq!(ended.state, "cancelled", "{gate}: {ended:#?}");
        assert_eq!(bench.world.running(&vm.id), ["a"], "{gate}");
        let (_, late) = bench.http("POST", &format!("{RECEIVERS}/{id}/activate"), "{}").await;
        assert_eq!(late["code"], "not_at_gate", "{late}");
        assert!(bench.planner.store().reservations().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_gate_that_nobody_opens_in_time_gives_the_move_up_with_a_cause() {
    for gate in ["start", "switchover", "commit"] {
        let bench = Bench::new(&["a", "b"]).await;
        let vm = bench.start("web1", 1, "a").await;
        let body =
            format!(r#"{{"target_host": "b", "gates": ["{gate}"], "gate_deadline_ms": 100}}"#);
        let id = prepared(&bench, &body).await;
        let ended = bench.ended(&id).await;
        assert_eq!(ended.phase, "aborted", "{gate}: {ended:#?}");
        assert!(ended.error.contains(&format!("nobody opened the {gate} gate")), "{}", ended.error);
        let running = || bench.world.running(&vm.id) == ["a"];
        until(running).await;
        let after = bench.planner.get_vm("web1").await.unwrap();
        assert_eq!((after.host.as_str(), after.generation), ("a", 1), "{gate}");
    }
}

#[tokio::test]
async fn gates_that_there_are_not_are_refused_by_name() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let body = r#"{"target_host": "b", "gates": ["door"]}"#;
    let (status, refused) = bench.http("POST", &native("prepare-receiver"), body).await;
    assert_eq!((status, refused["details"]["field"].as_str()), (400, Some("gates")), "{refused}");
    let (status, none) = bench.http("GET", &native("status"), "").await;
    assert_eq!((status, none["code"].as_str()), (404, Some("not_found")), "{none}");
}
