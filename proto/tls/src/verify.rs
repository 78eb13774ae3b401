//! Whom a client takes for the one it asked for.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::certificate::Certificate;
use crate::identity::{Identity, Role};

/// Who has to be at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// One identity.
    Exactly(Identity),
    /// Anybody of a role.
    Any(Role),
}

impl Expected {
    /// Says whether somebody is the one.
    #[must_use]
    pub fn admits(&self, identity: &Identity) -> bool {
        match self {
            Self::Exactly(one) => one == identity,
            Self::Any(role) => *role == identity.role(),
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(one) => write!(f, "{one}"),
            Self::Any(role) => write!(f, "a {role}"),
        }
    }
}

/// Takes a server whose certificate our authority signed and whose identity is the expected one.
///
/// The name that was dialled plays no part: an address passes on, an identity does not.
#[derive(Debug)]
pub(crate) struct ByIdentity {
    pub(crate) roots: Arc<RootCertStore>,
    pub(crate) provider: Arc<CryptoProvider>,
    pub(crate) expected: Expected,
}

impl ServerCertVerifier for ByIdentity {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(end_entity)?,
            &self.roots,
            intermediates,
            now,
            self.provider.signature_verification_algorithms.all,
        )?;
        let expected = &self.expected;
        let read = Certificate::read(end_entity)
            .map_err(|error| Error::General(format!("certificate of the other end: {error}")))?;
        match read.identity {
            Some(identity) if expected.admits(&identity) => Ok(ServerCertVerified::assertion()),
            Some(identity) => Err(Error::General(format!(
                "the other end is {identity}, and {expected} was expected"
            ))),
            None => Err(Error::General(format!(
                "the other end's certificate ({}) names nobody, and {expected} was expected",
                read.subject
            ))),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
