//! Makes authorities and certificates, and puts them where programs look for them.
//!
//! Keys are made of the operating system's randomness; a serial number is derived from its key, so
//! no two certificates share one. The time comes from the caller.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use time::OffsetDateTime;

use crate::certificate::{Certificate, CertificateError, read_pem};
use crate::identity::{Identity, Role};
use crate::loaded::{CA_FILE, QemuEnd, file_name, key_name};

/// The file of an authority's key. It stays where certificates are made.
pub const CA_KEY_FILE: &str = "ca-key.pem";

/// A certificate counts from so long before it was made: clocks differ.
const BACKDATED: u64 = 3600;
const DAY: u64 = 86_400;

/// A certificate cannot be made or put down.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// The maker refuses.
    #[error("make a certificate")]
    Make(#[from] rcgen::Error),
    /// A certificate cannot be read.
    #[error("read a certificate")]
    Read(#[from] CertificateError),
    /// It is not one that signs others.
    #[error("`{0}` is no authority's certificate")]
    NoAuthority(String),
    /// The authority's key and certificate do not belong together.
    #[error("the authority's key is not that of its certificate")]
    OtherKey,
    /// The authority has ended.
    #[error("the authority ended {0} day(s) ago; make a new one with `vmferry pki init`")]
    AuthorityEnded(u64),
    /// A moment that no certificate can name.
    #[error("a validity of {0} days ends past any date")]
    Validity(u32),
    /// A file cannot be written.
    #[error("write {path}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// When a certificate is made and how long it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Now, in seconds since 1970.
    pub now: u64,
    /// From now.
    pub days: u32,
}

impl Validity {
    fn ends(self) -> u64 {
        self.now.saturating_add(u64::from(self.days).saturating_mul(DAY))
    }
}

/// Where else an identity is found: for browsers, and for programs that look at names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// DNS names.
    pub dns: Vec<String>,
    /// Addresses.
    pub addresses: Vec<IpAddr>,
}

/// What signs certificates.
#[derive(Debug)]
pub struct Authority {
    /// Its certificate.
    pub certificate_pem: String,
    /// Its key.
    pub key_pem: String,
}

/// A certificate and its key.
#[derive(Debug)]
pub struct Issued {
    /// Whose it is.
    pub identity: Identity,
    /// The certificate.
    pub certificate_pem: String,
    /// Its key.
    pub key_pem: String,
    /// Until when it counts, in seconds since 1970: not longer than its authority.
    pub not_after: u64,
}

fn moment(seconds: u64, validity: Validity) -> Result<OffsetDateTime, IssueError> {
    let seconds = i64::try_from(seconds).ok();
    seconds
        .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok())
        .ok_or(IssueError::Validity(validity.days))
}

fn params(
    subject: &[(DnType, &str)],
    validity: Validity,
    ends: u64,
) -> Result<CertificateParams, IssueError> {
    let mut params = CertificateParams::default();
    params.not_before = moment(validity.now.saturating_sub(BACKDATED), validity)?;
    params.not_after = moment(ends, validity)?;
    let mut name = rcgen::DistinguishedName::new();
    for (kind, text) in subject {
        name.push(kind.clone(), *text);
    }
    params.distinguished_name = name;
    Ok(params)
}

impl Authority {
    /// Makes a new one.
    ///
    /// # Errors
    ///
    /// Fails where its validity cannot be written.
    pub fn make(name: &str, validity: Validity) -> Result<Self, IssueError> {
        let subject = [(DnType::OrganizationName, "vmferry authority"), (DnType::CommonName, name)];
        let mut params = params(&subject, validity, validity.ends())?;
        // It signs identities, not further authorities.
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
        let certificate_pem = params.self_signed(&key)?.pem();
        Ok(Self { certificate_pem, key_pem: key.serialize_pem() })
    }

    /// Signs a certificate for an identity, with a key of its own.
    ///
    /// # Errors
    ///
    /// Fails where the authority has ended, or its key is another's.
    pub fn issue(
        &self,
        identity: &Identity,
        names: &Names,
        validity: Validity,
    ) -> Result<Issued, IssueError> {
        let own = self.says()?;
        if own.not_after < validity.now {
            return Err(IssueError::AuthorityEnded(own.days_left(validity.now).unsigned_abs()));
        }
        let signer = KeyPair::from_pem(&self.key_pem)?;
        self.check_key(&signer)?;
        let issuer = Issuer::from_ca_cert_pem(&self.certificate_pem, signer)?;
        let not_after = validity.ends().min(own.not_after);
        let organisation = identity.organisation();
        let subject = [
            (DnType::OrganizationName, organisation.as_str()),
            (DnType::CommonName, identity.name()),
        ];
        let mut params = params(&subject, validity, not_after)?;
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        // QEMU wants keyEncipherment even of keys that encipher nothing.
        params.key_usages =
            vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = match identity.role() {
            Role::Host | Role::Planner => {
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
            }
            Role::Operator => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        params.subject_alt_names = alternative_names(identity, names)?;
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
        let certificate_pem = params.signed_by(&key, &issuer)?.pem();
        let identity = identity.clone();
        Ok(Issued { identity, certificate_pem, key_pem: key.serialize_pem(), not_after })
    }

    /// Returns what its certificate says.
    ///
    /// # Errors
    ///
    /// Fails where it is no authority's.
    pub fn says(&self) -> Result<Certificate, IssueError> {
        let found = read_pem(self.certificate_pem.as_bytes())?;
        let first = found.first().ok_or(CertificateError::Empty)?;
        let says = Certificate::read(first)?;
        if says.is_authority { Ok(says) } else { Err(IssueError::NoAuthority(says.subject)) }
    }

    fn check_key(&self, key: &KeyPair) -> Result<(), IssueError> {
        use rcgen::PublicKeyData as _;
        let found = read_pem(self.certificate_pem.as_bytes())?;
        let first = found.first().ok_or(CertificateError::Empty)?;
        let is_own = rustls::server::ParsedCertificate::try_from(first).is_ok_and(|parsed| {
            parsed.subject_public_key_info().as_ref() == key.subject_public_key_info()
        });
        if is_own { Ok(()) } else { Err(IssueError::OtherKey) }
    }
}

fn alternative_names(identity: &Identity, names: &Names) -> Result<Vec<SanType>, IssueError> {
    let mut found = vec![
        SanType::URI(identity.to_string().try_into()?),
        SanType::DnsName(identity.dns_name().try_into()?),
    ];
    for name in names.dns.iter().filter(|name| **name != identity.dns_name()) {
        found.push(SanType::DnsName(name.clone().try_into()?));
    }
    found.extend(names.addresses.iter().copied().map(SanType::IpAddress));
    Ok(found)
}

/// Returns the files of an identity's directory.
#[must_use]
pub fn files_of(role: Role) -> Vec<String> {
    let mut files = vec![CA_FILE.to_owned()];
    let server: &[QemuEnd] = if role.serves() { &[QemuEnd::Server] } else { &[] };
    for end in server.iter().chain(&[QemuEnd::Client]) {
        files.extend([file_name(*end), key_name(*end)]);
    }
    files
}

/// Puts an authority down: its certificate for everybody, its key for nobody else.
///
/// # Errors
///
/// Fails where a file cannot be written.
pub fn write_authority(dir: &Path, authority: &Authority) -> Result<(), IssueError> {
    make_dir(dir)?;
    write(dir, CA_KEY_FILE, authority.key_pem.as_bytes(), SECRET)?;
    write(dir, CA_FILE, authority.certificate_pem.as_bytes(), PUBLIC)
}

/// Gives an identity's directory the authorities that are trusted now.
///
/// # Errors
///
/// Fails where the file cannot be written.
pub fn write_trust(dir: &Path, ca_pem: &str) -> Result<(), IssueError> {
    write(dir, CA_FILE, ca_pem.as_bytes(), PUBLIC)
}

/// Puts an identity down, so that agents, planners, the command line and QEMU find it.
///
/// Each file is replaced as a whole. Who reads between two of them finds a certificate and a key that
/// do not belong together, says so and looks again.
///
/// # Errors
///
/// Fails where a file cannot be written.
pub fn write_identity(dir: &Path, ca_pem: &str, issued: &Issued) -> Result<(), IssueError> {
    make_dir(dir)?;
    write(dir, CA_FILE, ca_pem.as_bytes(), PUBLIC)?;
    let client = QemuEnd::Client;
    if issued.identity.role().serves() {
        let server = QemuEnd::Server;
        write(dir, &key_name(server), issued.key_pem.as_bytes(), SECRET)?;
        write(dir, &file_name(server), issued.certificate_pem.as_bytes(), PUBLIC)?;
        // One certificate for both: the ends of a connection change with each move.
        link(dir, &key_name(server), &key_name(client))?;
        return link(dir, &file_name(server), &file_name(client));
    }
    write(dir, &key_name(client), issued.key_pem.as_bytes(), SECRET)?;
    write(dir, &file_name(client), issued.certificate_pem.as_bytes(), PUBLIC)
}

const SECRET: u32 = 0o600;
const PUBLIC: u32 = 0o644;

fn make_dir(dir: &Path) -> Result<(), IssueError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(dir).map_err(|source| IssueError::Write { path: dir.to_owned(), source })
}

/// Replaces a file as a whole, on the disk before it has its name.
fn write(dir: &Path, name: &str, bytes: &[u8], mode: u32) -> Result<(), IssueError> {
    let path = dir.join(name);
    let fresh = dir.join(format!(".{name}.new"));
    let put = || -> io::Result<()> {
        remove(&fresh)?;
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&fresh, &path)?;
        File::open(dir)?.sync_all()
    };
    put().map_err(|source| IssueError::Write { path, source })
}

fn link(dir: &Path, to: &str, name: &str) -> Result<(), IssueError> {
    let path = dir.join(name);
    let fresh = dir.join(format!(".{name}.new"));
    let put = || -> io::Result<()> {
        remove(&fresh)?;
        symlink(to, &fresh)?;
        fs::rename(&fresh, &path)?;
        File::open(dir)?.sync_all()
    };
    put().map_err(|source| IssueError::Write { path, source })
}

/// Removes what a writer that was killed has left.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}
