//! REST as strangers use it.

use serde_json::json;

use crate::bench::{Bench, definition};

#[tokio::test]
async fn a_vm_is_started_moved_and_looked_at() {
    let bench = Bench::new(&["a", "b"]).await;
    let body = json!({"definition": definition("web1", 1), "host": "a", "wait_ms": 10_000});
    let (status, vm) = bench.http("POST", "/api/vms", &body.to_string()).await;
    assert_eq!((status, vm["power"].as_str()), (200, Some("running")));
    let body = json!({"vm_name": "web1", "target_host": "b"});
    let (status, migration) = bench.http("POST", "/api/migrations", &body.to_string()).await;
    assert_eq!(status, 202, "{migration}");
    let id = migration["id"].as_str().unwrap();
    bench.ended(id).await;
    let (status, shown) = bench.http("GET", &format!("/api/migrations/{id}"), "").await;
    assert_eq!((status, shown["state"].as_str()), (200, Some("completed")));
    let (_, list) = bench.http("GET", "/api/migrations?vm=web1", "").await;
    assert_eq!(list["migrations"].as_array().unwrap().len(), 1);
    let (_, open) = bench.http("GET", "/api/migrations?open=true", "").await;
    assert!(open["migrations"].as_array().unwrap().is_empty());
    let (status, hosts) = bench.http("GET", "/api/hosts", "").await;
    assert_eq!((status, hosts["hosts"].as_array().unwrap().len()), (200, 2));
    let (status, _) = bench.http("GET", "/api/vms/web1", "").await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn events_are_streamed_to_the_last() {
    let bench = Bench::new(&["a", "b"]).await;
    bench.start("web1", 1, "a").await;
    let asked = bench.migrate("web1", "b").await;
    let (status, text) =
        bench.http("GET", &format!("/api/migrations/{}/events", asked.id), "").await;
    assert_eq!(status, 200);
    let text = text.as_str().unwrap();
    assert!(text.contains("event: migration"), "{text}");
    assert!(text.contains("\"state\":\"completed\""), "{text}");
}

#[tokio::test]
async fn bodies_that_are_wrong_are_refused_by_the_name_of_their_field() {
    let bench = Bench::new(&["a"]).await;
    for (path, body, field) in [
        ("/api/migrations", r#"{"vm": "web1"}"#, "vm"),
        ("/api/migrations", r#"{"vm_name": ""}"#, "vm_name"),
        ("/api/migrations", r#"{"vm_name": "x", "request_id": "7"}"#, "request_id"),
        ("/api/migrations", r#"{"vm_name": "x", "migration_type": "warm"}"#, "migration_type"),
        ("/api/migrations", r#"{"vm_name": "x", "method": "magic"}"#, "method"),
        ("/api/migrations", r#"{"vm_name": "x", "compress": true}"#, "compress"),
        (
            "/api/migrations",
            r#"{"vm_name": "x", "bandwidth_mbps": 18446744073709551615}"#,
            "bandwidth_mbps",
        ),
        ("/api/vms", r#"{}"#, "vm"),
        ("/api/vms", r#"{"definition": "name ="}"#, "definition"),
        ("/api/vms", r#"{"definition": "memory = \"1GiB\"\nname = \"../x\""}"#, "definition"),
    ] {
        let (status, answer) = bench.http("POST", path, body).await;
        assert_eq!(status, 400, "{body}: {answer}");
        assert_eq!(answer["details"]["field"], field, "{body}: {answer}");
        assert_eq!(answer["code"], "invalid", "{body}");
        assert!(answer["message"].as_str().unwrap().contains(field), "{body}: {answer}");
    }
}

#[tokio::test]
async fn bodies_that_are_no_json_are_refused() {
    let bench = Bench::new(&["a"]).await;
    let deep = "[".repeat(100_000);
    let long = format!("{{\"vm_name\": \"{}\"}}", "x".repeat(2 << 20));
    for (body, expected) in [
        ("{", 400),
        ("null", 400),
        ("[]", 400),
        (r#"{"vm_name": 7}"#, 400),
        (r#"{"vm_name": "x", "compress": "yes"}"#, 400),
        (r#"{"vm_name": "x", "bandwidth_mbps": -1}"#, 400),
        (r#"{"vm_name": "x", "bandwidth_mbps": 1e99}"#, 400),
        ("\u{0}\u{1}", 400),
        (deep.as_str(), 400),
        (long.as_str(), 413),
    ] {
        let (status, answer) = bench.http("POST", "/api/migrations", body).await;
        // A body that is too long may be answered by a closed connection.
        let refused = status == expected || (expected == 413 && status == 0);
        let shown: String = body.chars().take(60).collect();
        assert!(refused, "{shown}: {status} {answer}");
    }
    let (status, _) = bench.http("GET", "/healthz", "").await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn what_is_not_there_is_not_found() {
    let bench = Bench::new(&["a"]).await;
    for (method, path, expected) in [
        ("GET", "/api/vms/none", 404),
        ("GET", "/api/hosts/none", 404),
        ("GET", "/api/migrations/none", 404),
        ("GET", "/api/migrations/01234567-89ab-cdef-0123-456789abcdef", 404),
        ("GET", "/api/migrations/none/events", 404),
        ("POST", "/api/migrations/none/cancel", 404),
        ("POST", "/api/vms/none/stop", 404),
        ("POST", "/api/vms/none/start", 404),
        ("GET", "/api/none", 404),
        ("DELETE", "/api/vms", 405),
        ("GET", "/api/migrations?limit=-1", 400),
        ("GET", "/api/migrations?nonsense=1", 400),
        ("GET", "/api/vms/%00%ff", 400),
    ] {
        let (status, answer) = bench.http(method, path, "").await;
        assert_eq!(status, expected, "{method} {path}: {answer}");
    }
}

#[tokio::test]
async fn metrics_name_every_open_phase() {
    let bench = Bench::new(&["a"]).await;
    let (status, text) = bench.http("GET", "/metrics", "").await;
    let text = text.as_str().unwrap();
    assert_eq!(status, 200);
    assert!(text.contains("vmferry_migrations_open{phase=\"queued\"} 0"), "{text}");
    assert!(text.contains("vmferry_report_age_seconds{host=\"a\"}"), "{text}");
    let (status, _) = bench.http("GET", "/readyz", "").await;
    assert_eq!(status, 200);
}
