//! A monitor connection, against a scripted monitor and a real QEMU.

#![expect(clippy::unwrap_used, clippy::panic, reason = "what helps a test fails as the test does")]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use vmferry_agent::monitor::{CloseCause, Delivery, Heard, IN_BAND_MAX, Monitor, MonitorError};
use vmferry_qmp::command::{Closefd, Cont, Getfd, QueryMigrate, QueryStatus, QueryYank};
use vmferry_qmp::{EventView, MigrationStatus, RunState, SessionError};

const BOUND: Duration = Duration::from_secs(10);
/// What is waited for that will not come.
const SHORT: Duration = Duration::from_millis(50);

const GREETING: &str = r#"{"QMP":{"version":{"qemu":{"micro":2,"minor":0,"major":10},"package":""},"capabilities":["oob"]}}"#;

/// The far side of a connection, played by the test.
struct Fake {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl Fake {
    fn new(stream: UnixStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { reader: BufReader::new(reader), writer }
    }

    async fn say(&mut self, text: &str) {
        self.writer.write_all(text.as_bytes()).await.unwrap();
        self.writer.write_all(b"\r\n").await.unwrap();
    }

    async fn say_bytes(&mut self, bytes: &[u8]) {
        self.writer.write_all(bytes).await.unwrap();
    }

    async fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.reader.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    async fn answer(&mut self, to: &Value, returned: Value) {
        self.say(&json!({"return": returned, "id": to["id"]}).to_string()).await;
    }

    async fn welcome(&mut self) {
        self.say(GREETING).await;
        let negotiation = self.hear().await;
        assert_eq!(negotiation["execute"], "qmp_capabilities");
        assert_eq!(negotiation["arguments"]["enable"], json!(["oob"]));
        self.answer(&negotiation, json!({})).await;
    }
}

struct Place {
    _temporary: tempfile::TempDir,
    path: PathBuf,
    listener: UnixListener,
}

fn place() -> Place {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("qmp.sock");
    let listener = UnixListener::bind(&path).unwrap();
    Place { _temporary: temporary, path, listener }
}

/// Returns both ends of a connection that is ready.
async fn connected() -> (Monitor, Fake) {
    let place = place();
    let far = async {
        let mut fake = Fake::new(place.listener.accept().await.unwrap().0);
        fake.welcome().await;
        fake
    };
    let (monitor, fake) = tokio::join!(Monitor::connect(&place.path, BOUND), far);
    (monitor.unwrap(), fake)
}

#[tokio::test]
async fn replies_out_of_order_find_their_callers() {
    let (monitor, mut fake) = connected().await;
    let far = async {
        let first = fake.hear().await;
        let second = fake.hear().await;
        fake.say(r#"{"event":"NOVELTY_OF_2031","data":{"a":[1]},"timestamp":{"seconds":-1,"microseconds":-1}}"#).await;
        fake.say(r#"{"error":{"class":"GenericError","desc":"JSON parse error, no id"}}"#).await;
        fake.say(r#"{"return":{},"id":"not ours"}"#).await;
        for command in [second, first] {
            let returned = json!({"of": command["execute"], "novel": true});
            fake.answer(&command, returned).await;
        }
    };
    let one = monitor.execute_raw("one", json!({}), BOUND);
    let two = monitor.execute_raw("two", json!({"x": 1}), BOUND);
    let (one, two, ()) = tokio::join!(one, two, far);
    assert_eq!(one.unwrap()["of"], "one");
    assert_eq!(two.unwrap()["of"], "two");
}

#[tokio::test]
async fn a_late_reply_neither_hangs_nor_breaks_the_connection() {
    let (monitor, mut fake) = connected().await;
    let silent = monitor.execute_within(QueryStatus {}, SHORT).await;
    let Err(error @ MonitorError::Silent { .. }) = silent else { panic!("not {silent:?}") };
    assert_eq!(error.delivery(), Delivery::Sent);
    let late = fake.hear().await;
    fake.answer(&late, json!({"status": "paused", "running": false})).await;
    let far = async {
        let next = fake.hear().await;
        fake.answer(&next, json!({"status": "frozen-in-2031", "running": false})).await;
    };
    let (status, ()) = tokio::join!(monitor.execute(QueryStatus {}), far);
    assert_eq!(status.unwrap().status, RunState::Unknown("frozen-in-2031".to_owned()));
    assert!(monitor.close_cause().is_none());
}

#[tokio::test]
async fn a_place_in_qemus_queue_is_held_until_qemu_answers() {
    let (monitor, mut fake) = connected().await;
    for _ in 0..IN_BAND_MAX {
        let silent = monitor.execute_within(QueryMigrate {}, SHORT).await;
        assert_eq!(silent.unwrap_err().delivery(), Delivery::Sent);
    }
    let crowded = monitor.execute_within(Cont {}, SHORT).await.unwrap_err();
    assert_eq!(crowded.delivery(), Delivery::Unsent, "{crowded}");

    // Out of band there is always a place.
    let mut heard = Vec::new();
    let far = async {
        for _ in 0..IN_BAND_MAX {
            heard.push(fake.hear().await);
        }
        let yank = fake.hear().await;
        assert_eq!(yank["exec-oob"], "query-yank", "`cont` was given up and is never sent");
        fake.answer(&yank, json!([])).await;
    };
    let (yank, ()) = tokio::join!(monitor.execute_oob(QueryYank {}, BOUND), far);
    yank.unwrap();

    fake.answer(&heard[0], json!({})).await;
    let far = async {
        let next = fake.hear().await;
        assert_eq!(next["execute"], "query-migrate");
        fake.answer(&next, json!({"status": "active"})).await;
    };
    let (info, ()) = tokio::join!(monitor.execute(QueryMigrate {}), far);
    assert_eq!(info.unwrap().status, Some(MigrationStatus::Active));
}

#[tokio::test]
async fn a_dropped_call_that_was_not_sent_is_never_sent() {
    let (monitor, mut fake) = connected().await;
    for _ in 0..IN_BAND_MAX {
        monitor.execute_within(QueryMigrate {}, SHORT).await.unwrap_err();
    }
    // As `select!` would drop it.
    let dropped = tokio::time::timeout(SHORT, monitor.execute(Cont {})).await;
    assert!(dropped.is_err());
    for _ in 0..IN_BAND_MAX {
        let command = fake.hear().await;
        fake.answer(&command, json!({})).await;
    }
    let far = async {
        let next = fake.hear().await;
        assert_eq!(next["execute"], "query-status");
        fake.answer(&next, json!({"status": "running", "running": true})).await;
    };
    let (status, ()) = tokio::join!(monitor.execute(QueryStatus {}), far);
    assert!(status.unwrap().running);
}

#[tokio::test]
async fn a_connection_that_is_never_greeted_ends_at_the_deadline() {
    let place = place();
    let refused = Monitor::connect(&place.path, SHORT).await;
    let Err(error @ MonitorError::NotGreeted { .. }) = refused else { panic!("not {refused:?}") };
    assert_eq!(error.delivery(), Delivery::Unsent);
    let nobody = Monitor::connect(&place.path.with_extension("no"), SHORT).await;
    assert!(matches!(nobody, Err(MonitorError::Connect { .. })));
}

#[tokio::test]
async fn half_a_greeting_is_not_a_greeting() {
    let place = place();
    let far = async {
        let mut fake = Fake::new(place.listener.accept().await.unwrap().0);
        fake.say_bytes(br#"{"QMP": {"version""#).await;
    };
    let (refused, ()) = tokio::join!(Monitor::connect(&place.path, BOUND), far);
    let Err(MonitorError::Closed { source: CloseCause::Session(cause), .. }) = refused else {
        panic!("not {refused:?}");
    };
    assert!(cause.to_string().contains("not QMP"), "{cause}");
}

#[tokio::test]
async fn what_ends_a_connection_is_told_to_all_who_wait() {
    let endings: [&[u8]; 4] =
        [br#"{"return": {"status": "run"#, b"{\"return\": \"\xc3", b"\x00\xff\xfe garbage\n", b""];
    for ending in endings {
        let (monitor, mut fake) = connected().await;
        let mut events = monitor.events();
        let far = async {
            fake.hear().await;
            fake.say(r#"{"event":"STOP"}"#).await;
            fake.say_bytes(ending).await;
            drop(fake);
        };
        let (ended, ()) = tokio::join!(monitor.execute(Cont {}), far);
        let Err(error @ MonitorError::Closed { .. }) = ended else { panic!("not {ended:?}") };
        assert_eq!(error.delivery(), Delivery::Sent, "the command may have been executed");
        let CloseCause::Session(cause) = monitor.closed().await else { panic!("another cause") };
        let clean = matches!(*cause, SessionError::Closed);
        assert_eq!(clean, ending.is_empty(), "{cause:?}");
        // The event before the end was not lost, and the end is heard as well.
        assert!(matches!(events.next().await, Some(Heard::Event(event)) if event.name == "STOP"));
        assert!(events.next().await.is_none());
        assert!(monitor.events().next().await.is_none());
        let later = monitor.execute(Cont {}).await.unwrap_err();
        assert_eq!(later.delivery(), Delivery::Unsent, "{later:?}");
    }
}

#[tokio::test]
async fn a_slow_listener_is_told_that_it_must_read_anew() {
    let (monitor, mut fake) = connected().await;
    let mut events = monitor.events();
    for pass in 0..1000 {
        fake.say(&json!({"event": "MIGRATION_PASS", "data": {"pass": pass}}).to_string()).await;
    }
    let far = async {
        let command = fake.hear().await;
        fake.answer(&command, json!({})).await;
    };
    let (sent, ()) = tokio::join!(monitor.execute(Cont {}), far);
    sent.unwrap();
    let Some(Heard::Lagged(lost)) = events.next().await else { panic!("it was too slow") };
    let Some(Heard::Event(next)) = events.next().await else { panic!("the rest is there") };
    assert_eq!(next.view(), EventView::MigrationPass(lost));
}

#[tokio::test]
async fn a_refusal_is_told_in_qemus_words() {
    let (monitor, mut fake) = connected().await;
    let far = async {
        let command = fake.hear().await;
        let error = json!({"class": "NovelClass", "desc": "Migration is not finalized yet"});
        fake.say(&json!({"error": error, "id": command["id"]}).to_string()).await;
    };
    let (refused, ()) = tokio::join!(monitor.execute(Cont {}), far);
    let error = refused.unwrap_err();
    assert_eq!(error.delivery(), Delivery::Sent);
    let refusal = error.refused().unwrap();
    assert_eq!(refusal.to_string(), "NovelClass: Migration is not finalized yet");
}

#[tokio::test]
async fn a_large_command_is_written_whole_while_replies_come_in() {
    let (monitor, mut fake) = connected().await;
    let big = "x".repeat(4 << 20);
    let arguments = json!({"big": big});
    let far = async {
        for _ in 0..100 {
            fake.say(r#"{"event":"BALLOON_CHANGE","data":{"actual":1}}"#).await;
        }
        let command = fake.hear().await;
        fake.answer(&command, json!(command["arguments"]["big"].as_str().unwrap().len())).await;
    };
    let (length, ()) = tokio::join!(monitor.execute_raw("big", arguments, BOUND), far);
    assert_eq!(length.unwrap(), json!(4 << 20));
}

/// A QEMU that does not outlive the test.
struct Qemu {
    child: Child,
    directory: tempfile::TempDir,
}

impl Qemu {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let monitor = format!("unix:{},server=on,wait=off", directory.path().join("q").display());
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-display", "none", "-machine", "none", "-S", "-qmp"])
            .arg(monitor)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("q")
    }

    async fn connect(&self) -> Monitor {
        let start = Instant::now();
        loop {
            match Monitor::connect(&self.path(), BOUND).await {
                Ok(monitor) => return monitor,
                Err(MonitorError::Connect { .. }) => tokio::task::yield_now().await,
                Err(error) => panic!("{error:?}"),
            }
            assert!(Instant::now().duration_since(start) < BOUND);
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[tokio::test]
async fn a_real_monitor_serves_one_client_and_the_next_one_after_it() {
    let qemu = Qemu::start();
    let first = qemu.connect().await;
    assert_eq!(first.greeting().version.unwrap().major, 10);
    let second = Monitor::connect(&qemu.path(), SHORT).await;
    assert!(matches!(second, Err(MonitorError::NotGreeted { .. })), "{second:?}");
    first.execute(QueryStatus {}).await.unwrap();
    drop(first);
    let third = qemu.connect().await;
    assert_eq!(third.execute(QueryStatus {}).await.unwrap().status, RunState::PreLaunch);
}

#[tokio::test]
async fn a_real_monitor_takes_file_descriptors() {
    let qemu = Qemu::start();
    let monitor = qemu.connect().await;
    let file = tempfile::tempfile().unwrap();
    let named = Getfd { fdname: "passed".to_owned() };
    monitor.execute_with_fds(named, vec![file.into()], BOUND).await.unwrap();
    monitor.execute(Closefd { fdname: "passed".to_owned() }).await.unwrap();
    let gone = monitor.execute(Closefd { fdname: "passed".to_owned() }).await.unwrap_err();
    assert!(gone.refused().is_some(), "{gone:?}");
    let without = monitor.execute(Getfd { fdname: "none".to_owned() }).await.unwrap_err();
    assert!(without.refused().is_some(), "{without:?}");
}

#[tokio::test]
async fn a_real_qemu_that_is_killed_ends_the_connection() {
    let mut qemu = Qemu::start();
    let monitor = qemu.connect().await;
    qemu.child.kill().unwrap();
    monitor.closed().await;
    let error = monitor.execute(QueryStatus {}).await.unwrap_err();
    assert!(matches!(error, MonitorError::Closed { .. }), "{error:?}");
}
