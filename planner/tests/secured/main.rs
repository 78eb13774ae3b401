//! A planner with certificates: who may call what, over gRPC and HTTPS, and whom it calls.

#![expect(clippy::unwrap_used, reason = "a test ends where something is not as it must be")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::Channel;
use tonic::{Code, Status};
use vmferry_planner::agents::Agents as _;
use vmferry_planner::agents::rpc::{Directory, GrpcAgents};
use vmferry_planner::config::Config;
use vmferry_planner::faults::FaultPoints;
use vmferry_planner::inventory::Inventory;
use vmferry_planner::planner::{Parts, Planner};
use vmferry_planner::shutdown::Shutdown;
use vmferry_planner::store::Store;
use vmferry_planner::store::sql::SqlStore;
use vmferry_planner::{security, server};
use vmferry_proto::reporting::Reporting;
use vmferry_proto::v1::planner_client::PlannerClient;
use vmferry_proto::v1::{ErrorDetail, HostReport, ListHostsRequest, ReportReply};
use vmferry_tls::issue::{Authority, Names, Validity, write_identity};
use vmferry_tls::{Acceptor, Expected, Identity, Live, Protocol, Role, Security, Use, now};

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

    /// Issues an identity; returns where it is.
    fn issue(&self, role: Role, name: &str) -> std::path::PathBuf {
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
}

struct Fleet {
    pki: Pki,
    grpc: String,
    rest: String,
    planner: Arc<Planner>,
}

impl Fleet {
    async fn new() -> Self {
        let pki = Pki::new();
        let dir = pki.issue(Role::Planner, "p");
        let state = pki.dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let text = format!(
            "state_dir = \"{}\"\n[listen]\ngrpc = \"127.0.0.1:0\"\nrest = \"127.0.0.1:0\"\n[tls]\ndir = \"{}\"\n",
            state.display(),
            dir.display()
        );
        let path = pki.dir.path().join("planner.toml");
        std::fs::write(&path, text).unwrap();
        let config = Config::load(&path).unwrap();
        let (grpc_security, rest_security) = security::open(config.tls.as_ref()).unwrap();
        let store: Arc<dyn Store> = Arc::new(SqlStore::open(&config.store).await.unwrap());
        let directory = Arc::new(Directory::default());
        let inventory =
            Inventory::load(&config, Arc::clone(&directory), store.as_ref()).await.unwrap();
        let planner = Planner::new(Parts {
            config,
            store,
            agents: Arc::new(GrpcAgents::new(directory, grpc_security.clone())),
            inventory,
            faults: FaultPoints::new(None),
            shutdown: Shutdown::default(),
        });
        let grpc = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let rest = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (grpc_at, rest_at) = (grpc.local_addr().unwrap(), rest.local_addr().unwrap());
        server::serve(
            &planner,
            Acceptor::new(grpc, grpc_security, Protocol::Grpc),
            Acceptor::new(rest, rest_security, Protocol::Http),
        );
        Self { pki, grpc: format!("https://{grpc_at}"), rest: rest_at.to_string(), planner }
    }

    fn client(&self, security: &Security) -> PlannerClient<Channel> {
        let (endpoint, _) = vmferry_tls::endpoint(&self.grpc).unwrap();
        let expected = Expected::Any(Role::Planner);
        PlannerClient::new(vmferry_tls::channel(&endpoint, security, expected))
    }
}

fn report(host: &str) -> HostReport {
    HostReport {
        host_id: host.to_owned(),
        name: host.to_owned(),
        boot_id: "b".to_owned(),
        agent_instance: "i".to_owned(),
        agent_address: "127.0.0.1:1".to_owned(),
        sequence: 1,
        ..HostReport::default()
    }
}

/// Reports as host `host` over a call of its own.
async fn tell(client: &mut PlannerClient<Channel>, host: &str) -> Result<ReportReply, Status> {
    let call = Reporting::open(Duration::from_secs(10), |reports| client.report(reports)).await?;
    call.send(report(host)).await.map(|(reply, _)| reply)
}

fn code(status: &Status) -> (Code, String) {
    let detail: ErrorDetail = prost::Message::decode(status.details()).unwrap();
    (status.code(), detail.code)
}

#[tokio::test]
async fn a_host_speaks_for_itself_and_does_nothing_else() {
    let fleet = Fleet::new().await;
    let mut host = fleet.client(&fleet.pki.security(Role::Host, "a"));
    let reply = tell(&mut host, "a").await.unwrap();
    assert_eq!(reply.refused, "");
    let not_allowed = (Code::PermissionDenied, "not_allowed".to_owned());
    let refused = tell(&mut host, "b").await.unwrap_err();
    assert_eq!(code(&refused), not_allowed);
    assert!(refused.message().contains("host_id"), "{refused}");
    let refused = host.list_hosts(ListHostsRequest {}).await.unwrap_err();
    assert_eq!(code(&refused), not_allowed);
    let mut operator = fleet.client(&fleet.pki.security(Role::Operator, "ann"));
    let hosts = operator.list_hosts(ListHostsRequest {}).await.unwrap().into_inner().hosts;
    assert_eq!(hosts.iter().map(|host| host.id.as_str()).collect::<Vec<_>>(), ["a"]);
    let refused = tell(&mut operator, "a").await.unwrap_err();
    assert_eq!(code(&refused), not_allowed);
    let mut planner = fleet.client(&fleet.pki.security(Role::Planner, "q"));
    assert_eq!(code(&planner.list_hosts(ListHostsRequest {}).await.unwrap_err()), not_allowed);
    fleet.planner.leave().await;
}

#[tokio::test]
async fn strangers_and_plain_text_get_nowhere() {
    let fleet = Fleet::new().await;
    let stranger = Pki::new().security(Role::Operator, "eve");
    assert!(fleet.client(&stranger).list_hosts(ListHostsRequest {}).await.is_err());
    let (endpoint, _) = vmferry_tls::endpoint(&fleet.grpc).unwrap();
    let mut plain = PlannerClient::new(endpoint.connect_lazy());
    assert!(plain.list_hosts(ListHostsRequest {}).await.is_err());
    fleet.planner.leave().await;
}

/// Asks over HTTPS, with or without a certificate; returns the status and the whole answer.
async fn https(address: &str, identity: Option<&Path>, ca_pem: &str, path: &str) -> (u16, String) {
    use rustls::pki_types::pem::PemObject as _;
    let mut roots = rustls::RootCertStore::empty();
    for der in vmferry_tls::read_pem(ca_pem.as_bytes()).unwrap() {
        roots.add(der).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some(dir) => {
            let chain = std::fs::read(dir.join("client-cert.pem")).unwrap();
            let key = rustls::pki_types::PrivateKeyDer::from_pem_file(dir.join("client-key.pem"));
            let chain = vmferry_tls::read_pem(&chain).unwrap();
            builder.with_client_auth_cert(chain, key.unwrap()).unwrap()
        }
    };
    let stream = TcpStream::connect(address).await.unwrap();
    // A browser looks at names: this one is in every planner's certificate.
    let name = rustls::pki_types::ServerName::try_from("p.planner.vmferry").unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(name, stream).await.unwrap();
    let request = format!("GET {path} HTTP/1.0\r\nHost: p\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
}

#[tokio::test]
async fn rest_is_for_operators_and_health_for_everybody() {
    let fleet = Fleet::new().await;
    let ca = &fleet.pki.authority.certificate_pem;
    let (operator, host) =
        (fleet.pki.issue(Role::Operator, "ann"), fleet.pki.issue(Role::Host, "a"));
    assert_eq!(https(&fleet.rest, None, ca, "/healthz").await.0, 200);
    let (status, metrics) = https(&fleet.rest, None, ca, "/metrics").await;
    assert_eq!(status, 200);
    assert!(metrics.contains("vmferry_planner_certificate_not_after_seconds"), "{metrics}");
    let (status, answer) = https(&fleet.rest, None, ca, "/api/hosts").await;
    assert_eq!(status, 401);
    assert!(answer.contains("not_allowed"), "{answer}");
    assert_eq!(https(&fleet.rest, Some(&host), ca, "/api/hosts").await.0, 403);
    assert_eq!(https(&fleet.rest, Some(&operator), ca, "/api/hosts").await.0, 200);
    fleet.planner.leave().await;
}

#[tokio::test]
async fn an_agent_that_is_another_hosts_is_not_asked() {
    let pki = Pki::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut other = Acceptor::new(listener, pki.security(Role::Host, "b"), Protocol::Grpc);
    let directory = Arc::new(Directory::default());
    let host = "a".parse().unwrap();
    directory.learn(&host, &address);
    let agents = GrpcAgents::new(directory, pki.security(Role::Planner, "p"));
    let error = tokio::select! {
        answer = agents.report(&host) => answer.unwrap_err(),
        () = async { loop { drop(other.accept().await); } } => unreachable!("it takes connections for ever"),
    };
    let said = error.to_string();
    assert!(said.contains("is vmferry://host/b, and vmferry://host/a was expected"), "{said}");
    assert_eq!(error.code(), "");
}

#[test]
fn a_hosts_certificate_makes_no_planner() {
    let pki = Pki::new();
    let tls = vmferry_planner::config::Tls {
        dir: pki.issue(Role::Host, "a"),
        rest: vmferry_planner::config::RestSecurity::Tls,
    };
    let error = security::open(Some(&tls)).unwrap_err();
    assert!(error.to_string().contains("vmferry pki issue planner"), "{error}");
}
