//! What a certificate says.

use std::net::IpAddr;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer as _;

use crate::identity::{Identity, SCHEME};

/// A certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// It is none.
    #[error("it is no certificate: {0}")]
    Unreadable(String),
    /// The file holds none.
    #[error("it holds no certificate in PEM form")]
    Empty,
    /// It names an identity that cannot be one.
    #[error(transparent)]
    Identity(#[from] crate::identity::InvalidIdentity),
    /// It names more than one identity, so nobody could say whose it is.
    #[error("it names two identities, {0} and {1}; one certificate is for one")]
    TwoIdentities(Identity, Identity),
}

/// What a certificate says of itself. Whether that is true, its authority's signature says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Whose it is; an authority has no identity.
    pub identity: Option<Identity>,
    /// Its subject, for people.
    pub subject: String,
    /// Organisation and common name, if the subject is these two and no more.
    pub organisation_and_name: Option<(String, String)>,
    /// Its issuer, for people.
    pub issuer: String,
    /// Its serial number, in hexadecimal.
    pub serial: String,
    /// Since when it is valid, in seconds since 1970.
    pub not_before: u64,
    /// Until when it is valid, in seconds since 1970.
    pub not_after: u64,
    /// The DNS names in it.
    pub dns_names: Vec<String>,
    /// The addresses in it.
    pub addresses: Vec<IpAddr>,
    /// Whether it may sign others.
    pub is_authority: bool,
    /// SHA-256 of it, in hexadecimal.
    pub fingerprint: String,
}

impl Certificate {
    /// Reads what a certificate says.
    ///
    /// # Errors
    ///
    /// Fails where it is none, or where it is not clear whose it is.
    pub fn read(der: &[u8]) -> Result<Self, CertificateError> {
        let (rest, read) = X509Certificate::from_der(der)
            .map_err(|error| CertificateError::Unreadable(error.to_string()))?;
        if !rest.is_empty() {
            return Err(CertificateError::Unreadable("something follows it".to_owned()));
        }
        let mut found = Self {
            identity: None,
            subject: read.subject().to_string(),
            organisation_and_name: organisation_and_name(&read),
            issuer: read.issuer().to_string(),
            serial: hex(read.raw_serial()),
            not_before: seconds(read.validity().not_before.timestamp()),
            not_after: seconds(read.validity().not_after.timestamp()),
            dns_names: Vec::new(),
            addresses: Vec::new(),
            is_authority: read.is_ca(),
            fingerprint: hex(ring::digest::digest(&ring::digest::SHA256, der).as_ref()),
        };
        let names = read
            .subject_alternative_name()
            .map_err(|error| CertificateError::Unreadable(error.to_string()))?;
        for name in names.iter().flat_map(|names| &names.value.general_names) {
            found.take(name)?;
        }
        Ok(found)
    }

    fn take(&mut self, name: &GeneralName<'_>) -> Result<(), CertificateError> {
        if let GeneralName::URI(uri) = name
            && uri.starts_with(SCHEME)
        {
            let identity: Identity = uri.parse()?;
            if let Some(other) = self.identity.replace(identity.clone()) {
                return Err(CertificateError::TwoIdentities(other, identity));
            }
        } else if let GeneralName::DNSName(name) = name {
            self.dns_names.push((*name).to_owned());
        } else if let GeneralName::IPAddress(bytes) = name {
            self.addresses.extend(address(bytes));
        }
        Ok(())
    }

    /// Returns the whole days until it ends: 0 on its last day, negative once it has ended.
    #[must_use]
    pub fn days_left(&self, now: u64) -> i64 {
        const DAY: i64 = 86_400;
        let left = i64::try_from(self.not_after).unwrap_or(i64::MAX)
            - i64::try_from(now).unwrap_or(i64::MAX);
        left.div_euclid(DAY)
    }
}

/// Reads the certificates of a PEM text.
///
/// # Errors
///
/// Fails where there is none, or one that is broken.
pub fn read_pem(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(text)
        .collect::<Result<_, _>>()
        .map_err(|error| CertificateError::Unreadable(error.to_string()))?;
    if found.is_empty() { Err(CertificateError::Empty) } else { Ok(found) }
}

fn organisation_and_name(read: &X509Certificate<'_>) -> Option<(String, String)> {
    let subject = read.subject();
    let texts: Vec<String> = subject
        .iter_attributes()
        .map(|attribute| attribute.as_str().map(str::to_owned))
        .collect::<Result<_, _>>()
        .ok()?;
    let [organisation, name] = texts.as_slice() else { return None };
    let in_order = subject.iter_organization().next()?.as_str().ok()? == organisation
        && subject.iter_common_name().next()?.as_str().ok()? == name;
    // GnuTLS writes attributes that share a set with a plus sign.
    let separate = subject.iter_rdn().count() == 2;
    (in_order && separate).then(|| (organisation.clone(), name.clone()))
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(four) = <[u8; 4]>::try_from(bytes) {
        return Some(IpAddr::from(four));
    }
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from)
}

fn seconds(timestamp: i64) -> u64 {
    u64::try_from(timestamp).unwrap_or(0)
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let written = write!(text, "{byte:02x}");
        debug_assert!(written.is_ok());
        text
    })
}
