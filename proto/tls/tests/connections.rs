//! Connections between programs whose certificates are right, wrong, old and replaced.

#![expect(clippy::unwrap_used, reason = "a test ends where something is not as it must be")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use vmferry_tls::issue::{Authority, Names, Validity, write_identity};
use vmferry_tls::{
    Acceptor, Caller, Connector, Expected, Identity, Live, LoadError, Loaded, Looked, Protocol,
    QemuEnd, Role, Security, Use, now,
};

/// The longest that anything is waited for.
const BOUND: Duration = Duration::from_secs(20);
const DAY: u64 = 86_400;

fn authority() -> Authority {
    Authority::make("test", Validity { now: now(), days: 30 }).unwrap()
}

fn identity(text: &str) -> Identity {
    text.parse().unwrap()
}

/// Issues an identity into `dir`, as the command line does.
fn issue(dir: &Path, authority: &Authority, who: &str) {
    issue_until(dir, authority, who, Validity { now: now(), days: 30 });
}

fn issue_until(dir: &Path, authority: &Authority, who: &str, validity: Validity) {
    let issued = authority.issue(&identity(who), &Names::default(), validity).unwrap();
    write_identity(dir, &authority.certificate_pem, &issued).unwrap();
}

fn live(authority: &Authority, who: &str) -> (TempDir, Arc<Live>) {
    let dir = tempfile::tempdir().unwrap();
    issue(dir.path(), authority, who);
    let usage = if identity(who).role().serves() { Use::Daemon } else { Use::Client };
    let live = Live::open(dir.path(), usage).unwrap();
    (dir, live)
}

/// A server that says who called, and sends back what it is sent.
struct Server {
    address: String,
    callers: mpsc::Receiver<Caller>,
    _served: JoinSet<()>,
}

async fn serve(live: &Arc<Live>, protocol: Protocol) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut acceptor = Acceptor::new(listener, Security::Tls(live.clone()), protocol);
    let (heard, callers) = mpsc::channel(64);
    let mut served = JoinSet::new();
    served.spawn(async move {
        let mut open = JoinSet::new();
        loop {
            let mut connection = acceptor.accept().await;
            heard.send(connection.peer().caller.clone()).await.unwrap();
            open.spawn(async move {
                let mut buffer = [0; 1];
                while connection.read_exact(&mut buffer).await.is_ok() {
                    if connection.write_all(&buffer).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    Server { address, callers, _served: served }
}

/// Sends a byte and waits for it to come back: with TLS 1.3 a client learns only so whether it was taken.
async fn echo<S>(stream: &mut S) -> std::io::Result<()>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    stream.write_all(b"x").await?;
    stream.flush().await?;
    stream.read_exact(&mut [0; 1]).await.map(drop)
}

async fn try_echo(connector: &Connector, address: &str) -> Result<(), String> {
    let chain = |error: &dyn std::error::Error| {
        let cause = error.source().map(|cause| cause.to_string()).unwrap_or_default();
        format!("{error}: {cause}")
    };
    let mut stream = connector.connect(address).await.map_err(|error| chain(&error))?;
    echo(&mut stream).await.map_err(|error| chain(&error))
}

fn host(id: &str) -> Expected {
    Expected::Exactly(identity(&format!("vmferry://host/{id}")))
}

#[tokio::test]
async fn both_ends_know_who_the_other_is() {
    let authority = authority();
    let (_a, agent) = live(&authority, "vmferry://host/a");
    let (_p, planner) = live(&authority, "vmferry://planner/p");
    let mut server = serve(&agent, Protocol::Grpc).await;
    try_echo(&Connector::new(planner, host("a")), &server.address).await.unwrap();
    let caller = server.callers.recv().await.unwrap();
    assert_eq!(caller, Caller::Known(identity("vmferry://planner/p")));
}

#[tokio::test]
async fn another_hosts_certificate_is_not_this_hosts() {
    let authority = authority();
    let (_b, other) = live(&authority, "vmferry://host/b");
    let (_p, planner) = live(&authority, "vmferry://planner/a");
    let server = serve(&other, Protocol::Grpc).await;
    let connector = Connector::new(planner.clone(), host("a"));
    let error = try_echo(&connector, &server.address).await.unwrap_err();
    assert!(error.contains("is vmferry://host/b, and vmferry://host/a was expected"), "{error}");
    let connector = Connector::new(planner, Expected::Any(Role::Planner));
    let error = try_echo(&connector, &server.address).await.unwrap_err();
    assert!(error.contains("a planner was expected"), "{error}");
}

#[tokio::test]
async fn an_operator_cannot_pass_for_a_server() {
    let authority = authority();
    let dir = tempfile::tempdir().unwrap();
    issue(dir.path(), &authority, "vmferry://operator/eve");
    // Whoever stole it puts it where a server looks.
    for kind in ["cert", "key"] {
        let from = dir.path().join(format!("client-{kind}.pem"));
        std::fs::copy(from, dir.path().join(format!("server-{kind}.pem"))).unwrap();
    }
    let error = Loaded::read(dir.path(), Use::Daemon, now()).unwrap_err();
    assert!(error.to_string().contains("server-cert.pem"), "{error}");
}

#[tokio::test]
async fn another_authoritys_certificate_counts_for_nothing() {
    let (ours, theirs) = (authority(), authority());
    let (_a, agent) = live(&ours, "vmferry://host/a");
    let (_p, stranger) = live(&theirs, "vmferry://planner/p");
    let server = serve(&agent, Protocol::Grpc).await;
    // To a client of another authority the server is a stranger.
    let error = try_echo(&Connector::new(stranger, host("a")), &server.address).await.unwrap_err();
    assert!(error.contains("invalid peer certificate"), "{error}");
    // One that trusts the server is a stranger to it all the same.
    let dir = tempfile::tempdir().unwrap();
    issue(dir.path(), &theirs, "vmferry://planner/p");
    let both = format!("{}{}", ours.certificate_pem, theirs.certificate_pem);
    std::fs::write(dir.path().join("ca-cert.pem"), both).unwrap();
    let trusting = Live::open(dir.path(), Use::Daemon).unwrap();
    let refused = try_echo(&Connector::new(trusting, host("a")), &server.address).await;
    assert!(refused.is_err());
}

/// Connects as one who checks nothing and shows nothing.
async fn without_certificate(address: &str, ca_pem: &str) -> Result<(), String> {
    let mut roots = rustls::RootCertStore::empty();
    for der in vmferry_tls::read_pem(ca_pem.as_bytes()).unwrap() {
        roots.add(der).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let stream = TcpStream::connect(address).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("a.host.vmferry").unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(name, stream).await.map_err(|error| error.to_string())?;
    echo(&mut stream).await.map_err(|error| error.to_string())
}

#[tokio::test]
async fn without_a_certificate_there_is_no_grpc_and_http_knows_that_nobody_is_known() {
    let authority = authority();
    let (_a, agent) = live(&authority, "vmferry://host/a");
    let grpc = serve(&agent, Protocol::Grpc).await;
    let error = without_certificate(&grpc.address, &authority.certificate_pem).await.unwrap_err();
    assert!(error.contains("CertificateRequired"), "{error}");
    let mut http = serve(&agent, Protocol::Http).await;
    without_certificate(&http.address, &authority.certificate_pem).await.unwrap();
    assert_eq!(http.callers.recv().await.unwrap(), Caller::Anonymous);
}

#[tokio::test]
async fn plain_text_and_silence_hold_nobody_up() {
    let authority = authority();
    let (_a, agent) = live(&authority, "vmferry://host/a");
    let server = serve(&agent, Protocol::Grpc).await;
    let _silent = TcpStream::connect(&server.address).await.unwrap();
    let mut plain = TcpStream::connect(&server.address).await.unwrap();
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let (_p, planner) = live(&authority, "vmferry://planner/p");
    try_echo(&Connector::new(planner, host("a")), &server.address).await.unwrap();
    let mut answer = Vec::new();
    let ended = tokio::time::timeout(BOUND, plain.read_to_end(&mut answer)).await;
    assert!(ended.is_ok(), "a connection of plain text stays open");
}

#[tokio::test]
async fn a_certificate_that_ends_takes_its_connections_along() {
    let authority = authority();
    let (_a, agent) = live(&authority, "vmferry://host/a");
    let dir = tempfile::tempdir().unwrap();
    let soon = Validity { now: now() + 4 - DAY, days: 1 };
    issue_until(dir.path(), &authority, "vmferry://planner/p", soon);
    let planner = Live::open(dir.path(), Use::Daemon).unwrap();
    let server = serve(&agent, Protocol::Grpc).await;
    let connector = Connector::new(planner, host("a"));
    let mut stream = connector.connect(&server.address).await.unwrap();
    echo(&mut stream).await.unwrap();
    let outlived = async { while echo(&mut stream).await.is_ok() {} };
    assert!(tokio::time::timeout(BOUND, outlived).await.is_ok(), "it outlives its certificate");
    let error = try_echo(&connector, &server.address).await.unwrap_err();
    assert!(error.contains("xpired"), "{error}");
    let error = Live::open(dir.path(), Use::Daemon).unwrap_err();
    assert!(error.to_string().contains("vmferry pki renew"), "{error}");
}

#[tokio::test]
async fn new_files_count_without_a_restart_and_broken_ones_do_not() {
    let authority = authority();
    let (dir, agent) = live(&authority, "vmferry://host/a");
    let (_p, planner) = live(&authority, "vmferry://planner/p");
    let server = serve(&agent, Protocol::Grpc).await;
    let connector = Connector::new(planner, host("a"));
    assert_eq!(agent.look(), Looked::Same);
    issue(dir.path(), &authority, "vmferry://host/a");
    assert_eq!(agent.look(), Looked::Loaded);
    try_echo(&connector, &server.address).await.unwrap();

    let certificate = dir.path().join("server-cert.pem");
    let good = std::fs::read(&certificate).unwrap();
    std::fs::write(&certificate, &good[..good.len() / 2]).unwrap();
    assert_eq!(agent.look(), Looked::Kept);
    assert!(agent.trouble().unwrap().contains("-cert.pem"));
    try_echo(&connector, &server.address).await.unwrap();
    // Another host's files are no renewal.
    issue(dir.path(), &authority, "vmferry://host/b");
    assert_eq!(agent.look(), Looked::Kept);
    assert!(agent.trouble().unwrap().contains("vmferry://host/b"));
    try_echo(&connector, &server.address).await.unwrap();
    // A key alone, as between two renames.
    issue(dir.path(), &authority, "vmferry://host/a");
    std::fs::write(&certificate, &good).unwrap();
    assert_eq!(agent.look(), Looked::Kept);
    issue(dir.path(), &authority, "vmferry://host/a");
    assert_eq!((agent.look(), agent.trouble()), (Looked::Loaded, None));
}

#[tokio::test]
async fn an_authority_that_is_trusted_no_more_takes_its_connections_along() {
    let (old, new) = (authority(), authority());
    let (dir, agent) = live(&old, "vmferry://host/a");
    let (_p, planner) = live(&old, "vmferry://planner/p");
    let server = serve(&agent, Protocol::Grpc).await;
    let connector = Connector::new(planner, host("a"));
    let mut stream = connector.connect(&server.address).await.unwrap();
    echo(&mut stream).await.unwrap();
    // A renewal changes nothing of what is trusted.
    issue(dir.path(), &old, "vmferry://host/a");
    assert_eq!(agent.look(), Looked::Loaded);
    echo(&mut stream).await.unwrap();
    issue(dir.path(), &new, "vmferry://host/a");
    assert_eq!(agent.look(), Looked::Loaded);
    assert!(echo(&mut stream).await.is_err());
    assert!(try_echo(&connector, &server.address).await.is_err());
}

#[test]
fn qemu_is_handed_all_that_it_would_else_make_itself() {
    let (_dir, agent) = live(&authority(), "vmferry://host/a");
    let loaded = agent.current();
    for (end, own) in [(QemuEnd::Server, "server"), (QemuEnd::Client, "client")] {
        let files = loaded.qemu_files(end).unwrap();
        let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
        let (certificate, key) = (format!("{own}-cert.pem"), format!("{own}-key.pem"));
        assert_eq!(names, ["ca-cert.pem", &certificate, &key, "dh-params.pem"]);
        assert!(files.iter().all(|(_, bytes)| bytes.starts_with(b"-----BEGIN ")));
    }
}

#[test]
fn what_cannot_be_used_is_named_with_its_file() {
    let authority = authority();
    let dir = tempfile::tempdir().unwrap();
    let fails = |usage| Loaded::read(dir.path(), usage, now()).unwrap_err();
    assert!(matches!(fails(Use::Client), LoadError::Read { .. }));
    issue(dir.path(), &authority, "vmferry://operator/ann");
    assert!(Loaded::read(dir.path(), Use::Client, now()).is_ok());
    assert!(fails(Use::Daemon).to_string().contains("server-cert.pem"));
    issue(dir.path(), &authority, "vmferry://host/a");
    assert!(Loaded::read(dir.path(), Use::Daemon, now()).is_ok());
    let far = Loaded::read(dir.path(), Use::Daemon, now() + 31 * DAY).unwrap_err();
    assert!(far.to_string().contains("ended"), "{far}");
    let early = Loaded::read(dir.path(), Use::Daemon, now() - 2 * DAY).unwrap_err();
    assert!(early.to_string().contains("clock"), "{early}");
    std::fs::write(dir.path().join("ca-cert.pem"), &self::authority().certificate_pem).unwrap();
    assert!(fails(Use::Client).to_string().contains("ca-cert.pem beside it"));
}
