//! One identity's files, read and checked as a whole.
//!
//! | file | is |
//! |---|---|
//! | `ca-cert.pem` | the authorities whose word counts; during a change of authority, both |
//! | `server-cert.pem`, `server-key.pem` | what is shown to whoever connects |
//! | `client-cert.pem`, `client-key.pem` | what is shown to whom we connect |
//!
//! These are the names under which QEMU looks for them as well.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::certificate::{Certificate, CertificateError, read_pem};
use crate::identity::{Identity, Role};
use crate::verify::{ByIdentity, Expected};

/// The authorities whose word counts.
pub const CA_FILE: &str = "ca-cert.pem";

/// Where QEMU looks for parameters of a key exchange that TLS 1.3 does not use. Without the file it makes
/// its own: 0.2 to 5 seconds, in which its monitor says nothing (seen with QEMU 10.0).
const DH_FILE: &str = "dh-params.pem";
/// The group ffdhe2048 of RFC 7919.
const DH_PARAMETERS: &[u8] = include_bytes!("ffdhe2048.pem");

/// The longest file that is read: a certificate or key takes a few kilobytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The protocols of gRPC and of REST, as TLS negotiates them.
const H2: &[u8] = b"h2";
const HTTP_1: &[u8] = b"http/1.1";

/// What a program does with its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It takes connections and makes them.
    Daemon,
    /// It only makes them.
    Client,
}

/// Which end of a stream a QEMU process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuEnd {
    /// It listens.
    Server,
    /// It connects.
    Client,
}

impl QemuEnd {
    /// Returns QEMU's word for it.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

/// Returns the file of the certificate that an end shows.
#[must_use]
pub fn file_name(end: QemuEnd) -> String {
    format!("{}-cert.pem", end.label())
}

/// Returns the file of that certificate's key.
#[must_use]
pub fn key_name(end: QemuEnd) -> String {
    format!("{}-key.pem", end.label())
}

/// An identity cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file cannot be read.
    #[error("read {path}; `vmferry pki issue` makes it", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file holds no certificate that can be used.
    #[error("use {path}", path = path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: CertificateError,
    },
    /// A file cannot be used for another reason.
    #[error("{path}: {problem}", path = path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
}

/// Until when something counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expiry {
    /// `own` or `authority`.
    pub of: &'static str,
    /// In seconds since 1970.
    pub not_after: u64,
}

/// An identity that was read and checked.
pub struct Loaded {
    identity: Identity,
    own_not_after: u64,
    authority_not_after: u64,
    ca_pem: Vec<u8>,
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
    server: Option<Served>,
    client: Pair,
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nothing else: there are keys in here.
        write!(f, "Loaded({})", self.identity)
    }
}

/// What is served to whoever connects.
struct Served {
    pair: Pair,
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
}

/// A certificate and its key, as the files hold them and as they are used.
struct Pair {
    certificate_pem: Vec<u8>,
    key_pem: Vec<u8>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    says: Certificate,
}

impl Loaded {
    /// Reads an identity's directory, and checks all of it at the time `now` (seconds since 1970).
    ///
    /// # Errors
    ///
    /// Fails at the first file that cannot be used, and says which.
    pub fn read(dir: &Path, usage: Use, now: u64) -> Result<Self, LoadError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let ca_path = dir.join(CA_FILE);
        let ca_pem = read_file(&ca_path)?;
        let (roots, authority_not_after) = read_authorities(&ca_path, &ca_pem)?;
        let checks = Checks { dir, roots: &roots, provider: &provider, now };
        let client = checks.pair(QemuEnd::Client)?;
        let server = match usage {
            Use::Client => None,
            Use::Daemon => {
                let pair = checks.pair(QemuEnd::Server)?;
                checks.same_identity(&client, &pair)?;
                let grpc = checks.server_config(&pair, Callers::Certified, H2)?;
                let http = checks.server_config(&pair, Callers::Anybody, HTTP_1)?;
                Some(Served { pair, grpc, http })
            }
        };
        let identity = checks.identity(QemuEnd::Client, &client)?;
        let pairs = [Some(&client), server.as_ref().map(|served| &served.pair)];
        let own_not_after =
            pairs.into_iter().flatten().map(|pair| pair.says.not_after).min().unwrap_or(0);
        let loaded = Self {
            identity,
            own_not_after,
            authority_not_after,
            ca_pem,
            roots: roots.clone(),
            provider: provider.clone(),
            server,
            client,
        };
        // What a connection would fail of is found out here.
        let anybody = Expected::Any(Role::Planner);
        loaded
            .client_config(anybody)
            .map_err(|error| checks.unusable_pair(QemuEnd::Client, &error))?;
        Ok(loaded)
    }

    /// Returns whose it is.
    #[must_use]
    pub const fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns until when its own certificates and its authorities' count.
    #[must_use]
    pub const fn expiries(&self) -> [Expiry; 2] {
        [
            Expiry { of: "own", not_after: self.own_not_after },
            Expiry { of: "authority", not_after: self.authority_not_after },
        ]
    }

    /// Says whether both trust the same authorities.
    pub(crate) fn trusts_as(&self, other: &Self) -> bool {
        self.ca_pem == other.ca_pem
    }

    /// Returns the files that QEMU wants for one end, with their names.
    #[must_use]
    pub fn qemu_files(&self, end: QemuEnd) -> Option<[(String, &[u8]); 4]> {
        let pair = match end {
            QemuEnd::Client => &self.client,
            QemuEnd::Server => &self.server.as_ref()?.pair,
        };
        Some([
            (CA_FILE.to_owned(), &self.ca_pem),
            (file_name(end), &pair.certificate_pem),
            (key_name(end), &pair.key_pem),
            (DH_FILE.to_owned(), DH_PARAMETERS),
        ])
    }

    pub(crate) fn grpc_config(&self) -> Option<Arc<ServerConfig>> {
        self.server.as_ref().map(|served| served.grpc.clone())
    }

    pub(crate) fn http_config(&self) -> Option<Arc<ServerConfig>> {
        self.server.as_ref().map(|served| served.http.clone())
    }

    pub(crate) fn client_config(&self, expected: Expected) -> Result<ClientConfig, rustls::Error> {
        let verifier =
            ByIdentity { roots: self.roots.clone(), provider: self.provider.clone(), expected };
        let mut config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(self.client.chain.clone(), self.client.key.clone_key())?;
        config.alpn_protocols = vec![H2.to_vec()];
        // A session taken up again would not be checked against what is trusted by then.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(config)
    }
}

/// Who may connect.
#[derive(Clone, Copy)]
enum Callers {
    /// Whoever has a certificate of our authority.
    Certified,
    /// Whoever has one, and whoever shows none.
    Anybody,
}

struct Checks<'a> {
    dir: &'a Path,
    roots: &'a Arc<RootCertStore>,
    provider: &'a Arc<CryptoProvider>,
    now: u64,
}

impl Checks<'_> {
    fn unusable(&self, file: &str, problem: impl Into<String>) -> LoadError {
        LoadError::Unusable { path: self.dir.join(file), problem: problem.into() }
    }

    fn unusable_pair(&self, end: QemuEnd, error: &rustls::Error) -> LoadError {
        self.unusable(&file_name(end), format!("with {}: {error}", key_name(end)))
    }

    fn pair(&self, end: QemuEnd) -> Result<Pair, LoadError> {
        let path = self.dir.join(file_name(end));
        let certificate_pem = read_file(&path)?;
        let in_file = |source| LoadError::Certificate { path: path.clone(), source };
        let chain = read_pem(&certificate_pem).map_err(in_file)?;
        let [own, intermediates @ ..] = chain.as_slice() else {
            return Err(in_file(CertificateError::Empty));
        };
        let says = Certificate::read(own).map_err(in_file)?;
        self.check_validity(end, &says)?;
        self.check_chain(end, own, intermediates)?;
        let key_pem = read_file(&self.dir.join(key_name(end)))?;
        let key = PrivateKeyDer::from_pem_slice(&key_pem)
            .map_err(|error| self.unusable(&key_name(end), format!("it is no key: {error}")))?;
        let pair = Pair { certificate_pem, key_pem, chain: chain.clone(), key, says };
        self.identity(end, &pair)?;
        Ok(pair)
    }

    fn check_validity(&self, end: QemuEnd, says: &Certificate) -> Result<(), LoadError> {
        if says.not_after < self.now {
            let days = says.days_left(self.now).unsigned_abs();
            return Err(self.unusable(
                &file_name(end),
                format!("it ended {days} day(s) ago; make a new one with `vmferry pki renew`"),
            ));
        }
        if says.not_before > self.now {
            return Err(self.unusable(
                &file_name(end),
                "it does not count yet; look at this machine's clock".to_owned(),
            ));
        }
        Ok(())
    }

    /// Checks that the others will take it, before any of them is asked.
    fn check_chain(
        &self,
        end: QemuEnd,
        own: &CertificateDer<'static>,
        intermediates: &[CertificateDer<'static>],
    ) -> Result<(), LoadError> {
        let now = UnixTime::since_unix_epoch(Duration::from_secs(self.now));
        let checked = match end {
            QemuEnd::Client => self
                .client_verifier(Callers::Certified)?
                .verify_client_cert(own, intermediates, now)
                .map(drop),
            QemuEnd::Server => rustls::server::ParsedCertificate::try_from(own).and_then(|own| {
                rustls::client::verify_server_cert_signed_by_trust_anchor(
                    &own,
                    self.roots,
                    intermediates,
                    now,
                    self.provider.signature_verification_algorithms.all,
                )
            }),
        };
        checked.map_err(|error| {
            self.unusable(
                &file_name(end),
                format!("it does not count by {CA_FILE} beside it: {error}"),
            )
        })
    }

    fn identity(&self, end: QemuEnd, pair: &Pair) -> Result<Identity, LoadError> {
        let file = file_name(end);
        let Some(identity) = pair.says.identity.clone() else {
            return Err(self.unusable(
                &file,
                "it names no identity (a URI like vmferry://host/a); make it with `vmferry pki issue`",
            ));
        };
        let wanted = (identity.organisation(), identity.name().to_owned());
        if pair.says.organisation_and_name.as_ref() != Some(&wanted) {
            return Err(self.unusable(
                &file,
                format!(
                    "its subject is `{}` and has to be `O={}, CN={}`: QEMU tells others by it",
                    pair.says.subject, wanted.0, wanted.1
                ),
            ));
        }
        if end == QemuEnd::Server && !pair.says.dns_names.contains(&identity.dns_name()) {
            return Err(self.unusable(
                &file,
                format!("it lacks the DNS name {}: QEMU looks for it", identity.dns_name()),
            ));
        }
        Ok(identity)
    }

    fn same_identity(&self, client: &Pair, server: &Pair) -> Result<(), LoadError> {
        match (&client.says.identity, &server.says.identity) {
            (Some(client), Some(server)) if client != server => Err(self.unusable(
                &file_name(QemuEnd::Server),
                format!("it is of {server}, and {} is of {client}", file_name(QemuEnd::Client)),
            )),
            (Some(_), _) | (None, _) => Ok(()),
        }
    }

    fn client_verifier(
        &self,
        callers: Callers,
    ) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, LoadError> {
        let builder =
            WebPkiClientVerifier::builder_with_provider(self.roots.clone(), self.provider.clone());
        let builder = match callers {
            Callers::Certified => builder,
            Callers::Anybody => builder.allow_unauthenticated(),
        };
        builder.build().map_err(|error| self.unusable(CA_FILE, error.to_string()))
    }

    fn server_config(
        &self,
        pair: &Pair,
        callers: Callers,
        protocol: &[u8],
    ) -> Result<Arc<ServerConfig>, LoadError> {
        let verifier = self.client_verifier(callers)?;
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|builder| {
                builder
                    .with_client_cert_verifier(verifier)
                    .with_single_cert(pair.chain.clone(), pair.key.clone_key())
            })
            .map_err(|error| self.unusable_pair(QemuEnd::Server, &error))?;
        config.alpn_protocols = vec![protocol.to_vec()];
        // A session taken up again would not be checked against what is trusted by then.
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, LoadError> {
    use io::Read as _;
    let failed = |source| LoadError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    let read = file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    if u64::try_from(read).unwrap_or(u64::MAX) == FILE_BYTES_MAX {
        let problem = "it is far too long to be a certificate or a key".to_owned();
        return Err(LoadError::Unusable { path: path.to_owned(), problem });
    }
    Ok(bytes)
}

/// Reads the authorities, and until when the first of them to end counts.
fn read_authorities(path: &Path, pem: &[u8]) -> Result<(Arc<RootCertStore>, u64), LoadError> {
    let in_file = |source| LoadError::Certificate { path: path.to_owned(), source };
    let mut roots = RootCertStore::empty();
    let mut not_after = u64::MAX;
    for der in read_pem(pem).map_err(in_file)? {
        let says = Certificate::read(&der).map_err(in_file)?;
        if !says.is_authority {
            let problem = format!("`{}` in it is no authority's certificate", says.subject);
            return Err(LoadError::Unusable { path: path.to_owned(), problem });
        }
        not_after = not_after.min(says.not_after);
        roots.add(der).map_err(|error| LoadError::Unusable {
            path: path.to_owned(),
            problem: error.to_string(),
        })?;
    }
    Ok((Arc::new(roots), not_after))
}
