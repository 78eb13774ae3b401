//! Moves between agents with certificates: the stream is TLS, and it is between these two hosts.

use std::path::PathBuf;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::Code;
use vmferry_proto::v1;
use vmferry_proto::v1::agent_client::AgentClient;
use vmferry_proto::v1::execute_request::Action;
use vmferry_tls::issue::{Authority, Names, Validity, write_identity};
use vmferry_tls::{Expected, Identity, Live, Role, Security, Use, now};

use crate::world::{BOUND, Host, Side, World, code};

/// A fleet's certificates.
struct Pki {
    authority: Authority,
    dir: TempDir,
}

impl Pki {
    fn new() -> Self {
        let authority = Authority::make("test", Validity { now: now(), days: 30 }).unwrap();
        Self { authority, dir: tempfile::tempdir().unwrap() }
    }

    fn issue(&self, role: Role, name: &str) -> PathBuf {
        let dir = self.dir.path().join(format!("{role}-{name}"));
        let identity = Identity::new(role, name).unwrap();
        let validity = Validity { now: now(), days: 30 };
        let issued = self.authority.issue(&identity, &Names::default(), validity).unwrap();
        write_identity(&dir, &self.authority.certificate_pem, &issued).unwrap();
        dir
    }

    fn security(&self, role: Role, name: &str) -> Security {
        let usage = if role.serves() { Use::Daemon } else { Use::Client };
        Security::Tls(Live::open(&self.issue(role, name), usage).unwrap())
    }

    async fn host(&self, id: &str, ports: u16) -> Host {
        let dir = self.issue(Role::Host, id);
        let more = format!("[tls]\ndir = '{}'\n", dir.display());
        Host::secured(id, ports, &more, self.security(Role::Planner, "p")).await
    }

    async fn world(&self) -> World {
        let ports = ports();
        let (a, b) = tokio::join!(self.host("a", ports), self.host("b", ports + 8));
        World::of(a, b)
    }
}

fn ports() -> u16 {
    20_000 + u16::try_from(std::process::id() % 1500).unwrap() * 16
}

async fn move_over(world: &mut World) {
    world.admit(&[Side::A, Side::B]).await;
    let listener = world.arm().await;
    world.transfer(listener).await.unwrap();
    world.wait_standing().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    world.generation += 1;
    let go_on = Action::ContinueDestination(v1::ContinueDestination {});
    world.execute(Side::B, go_on).await.unwrap();
    world.wait(Side::B, "the guest", |seen| seen.run_state == "running").await;
    let release = Action::ReleaseSource(v1::ReleaseSource::default());
    world.execute(Side::A, release).await.unwrap();
}

#[tokio::test]
async fn a_guest_moves_there_and_back_over_tls_and_strangers_end_no_receiver() {
    let pki = Pki::new();
    let mut world = pki.world().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let listener = world.arm().await;
    // What ends a receiver of plain text.
    let address = format!("{}:{}", listener.address, listener.port);
    drop(tokio::net::TcpStream::connect(&address).await.unwrap());
    let mut stranger = tokio::net::TcpStream::connect(&address).await.unwrap();
    stranger.write_all(b"QEVM\0\0\0\x03").await.unwrap();
    let mut answer = Vec::new();
    // Whether it is reset or closed is QEMU's choice.
    let ended = tokio::time::timeout(BOUND, stranger.read_to_end(&mut answer)).await;
    assert!(ended.is_ok(), "plain text is listened to");
    world.transfer(listener).await.unwrap();
    world.wait_standing().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    world.generation += 1;
    let go_on = Action::ContinueDestination(v1::ContinueDestination {});
    world.execute(Side::B, go_on).await.unwrap();
    let release = Action::ReleaseSource(v1::ReleaseSource::default());
    world.execute(Side::A, release).await.unwrap();
    // The process that received sends now, with certificates that are newer than it is.
    pki.issue(Role::Host, "a");
    pki.issue(Role::Host, "b");
    world.swap();
    move_over(&mut world).await;
    assert!(!world.b.holds_certificates(), "keys are left in the runtime directory");
    world.end().await;
}

#[tokio::test]
async fn a_receiver_takes_nothing_from_a_host_that_is_not_the_source() {
    let pki = Pki::new();
    let mut world = pki.world().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    // The receiver is told to expect host c.
    let source = v1::SourceDescription { tls_host: "c".to_owned(), ..world.describe().await };
    let arm = Action::ArmReceiver(v1::ArmReceiver { source: Some(source), policy: None });
    let armed = world.execute(Side::B, arm).await.unwrap();
    world.transfer(armed.listener.unwrap()).await.unwrap();
    // A guest this small stands still before QEMU has read that nobody takes it.
    let refused = |seen: &v1::VmObservation| {
        seen.transfer.as_ref().is_some_and(|transfer| !transfer.error.is_empty())
    };
    world.wait(Side::A, "the refusal", refused).await;
    assert!(!world.observe(Side::B).await.transfer.unwrap_or_default().complete);
    let cancel = Action::CancelTransfer(v1::CancelTransfer { cause: "refused".to_owned() });
    let seen = world.execute(Side::A, cancel).await.unwrap().observation.unwrap();
    assert_eq!(seen.run_state, "running");
    world.end().await;
}

#[tokio::test]
async fn a_source_sends_nothing_to_a_host_that_is_not_the_destination() {
    let pki = Pki::new();
    let mut world = pki.world().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let listener = world.arm().await;
    let start = |receiver_host: &str| {
        Action::StartTransfer(v1::StartTransfer {
            listener: Some(listener.clone()),
            receiver_host: receiver_host.to_owned(),
            ..v1::StartTransfer::default()
        })
    };
    let refused = world.execute(Side::A, start("")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("start_transfer.receiver_host"), "{refused}");
    world.execute(Side::A, start("c")).await.unwrap();
    let failed = |seen: &v1::VmObservation| {
        seen.transfer.as_ref().is_some_and(|transfer| transfer.status == "failed")
    };
    let seen = world.wait(Side::A, "the refusal", failed).await;
    let error = seen.transfer.unwrap().error;
    assert!(error.contains("c.host.vmferry"), "{error}");
    assert_eq!(seen.run_state, "running");
    world.end().await;
}

#[tokio::test]
async fn a_host_without_certificates_is_no_destination_of_one_that_has_them() {
    let pki = Pki::new();
    let ports = ports();
    let (a, b) = tokio::join!(pki.host("a", ports), Host::new("b", ports + 8));
    let mut world = World::of(a, b);
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let source = Some(world.describe().await);
    let check = v1::CheckDestinationRequest { source: source.clone() };
    let blockers = world.b.client.check_destination(check).await.unwrap().into_inner().blockers;
    assert_eq!(
        blockers.iter().map(|found| found.code.as_str()).collect::<Vec<_>>(),
        ["tls_mismatch"]
    );
    let arm = Action::ArmReceiver(v1::ArmReceiver { source, policy: None });
    let refused = world.execute(Side::B, arm).await.unwrap_err();
    assert_eq!(code(&refused).1, "blocked");
    assert!(refused.message().contains("tls_host"), "{refused}");
    world.end().await;
}

#[tokio::test]
async fn an_agent_is_commanded_by_planners_and_operators_and_by_no_other_host() {
    let pki = Pki::new();
    let mut host = pki.host("a", ports()).await;
    host.report().await;
    let address = host.address.clone();
    let as_role = |security: &Security| {
        let (endpoint, _) = vmferry_tls::endpoint(&address).unwrap();
        let expected = Expected::Exactly(Identity::new(Role::Host, "a").unwrap());
        AgentClient::new(vmferry_tls::channel(&endpoint, security, expected))
    };
    let asked = v1::GetReportRequest {};
    let mut operator = as_role(&pki.security(Role::Operator, "ann"));
    operator.get_report(asked).await.unwrap();
    let mut other = as_role(&pki.security(Role::Host, "b"));
    let refused = other.get_report(asked).await.unwrap_err();
    assert_eq!(code(&refused), (Code::PermissionDenied, "not_allowed".to_owned()));
    let mut stranger = as_role(&Pki::new().security(Role::Planner, "p"));
    assert!(stranger.get_report(asked).await.is_err());
    let (endpoint, _) = vmferry_tls::endpoint(&address).unwrap();
    let mut plain = AgentClient::new(endpoint.connect_lazy());
    assert!(plain.get_report(asked).await.is_err());
    host.stop().await;
}
