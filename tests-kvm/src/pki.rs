//! The certificates of one case, made as an operator makes them: by the built `vmferry pki`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use vmferry_tls::{Live, Security, Use};

/// How the parts of a case speak to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// As plain text, in namespaces of their own.
    PlainText,
    /// Over TLS, each under an identity.
    Tls,
}

/// Certificates for everybody in a case.
#[derive(Debug)]
pub struct Pki {
    vmferry: PathBuf,
    dir: PathBuf,
    operator: Security,
}

impl Pki {
    /// Makes an authority below `dir`, and an identity for whoever runs the case.
    ///
    /// # Errors
    ///
    /// Fails if the command line does.
    pub fn create(binaries: &Path, dir: &Path) -> Result<Self> {
        let (vmferry, dir) = (binaries.join("vmferry"), dir.join("pki"));
        run(&vmferry, &["pki", "init", "--pki", &dir.display().to_string()])?;
        let mut pki = Self { vmferry, dir, operator: Security::PlainText };
        let operator = pki.issue("operator", "e2e")?;
        pki.operator = Security::Tls(Live::open(&operator, Use::Client).context("load it")?);
        Ok(pki)
    }

    /// Issues an identity and returns where it is.
    ///
    /// # Errors
    ///
    /// Fails if the command line does.
    pub fn issue(&self, role: &str, name: &str) -> Result<PathBuf> {
        let dir = self.dir.display().to_string();
        run(&self.vmferry, &["pki", "issue", role, name, "--pki", &dir])?;
        Ok(self.identity(role, name))
    }

    /// Gives an identity a new key and certificate.
    ///
    /// # Errors
    ///
    /// Fails if the command line does.
    pub fn renew(&self, role: &str, name: &str) -> Result<()> {
        let identity = self.identity(role, name).display().to_string();
        run(&self.vmferry, &["pki", "renew", &identity, "--pki", &self.dir.display().to_string()])
    }

    /// Returns where an identity is.
    #[must_use]
    pub fn identity(&self, role: &str, name: &str) -> PathBuf {
        self.dir.join(role).join(name)
    }

    /// Returns how whoever runs the case speaks.
    #[must_use]
    pub fn operator(&self) -> &Security {
        &self.operator
    }
}

fn run(vmferry: &Path, arguments: &[&str]) -> Result<()> {
    let output = Command::new(vmferry).args(arguments).output().context("run vmferry")?;
    if !output.status.success() {
        bail!("vmferry {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
