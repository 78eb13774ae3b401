//! A test's own monitor to each QEMU process of a VM.
//!
//! The agent keeps its monitors for itself, so a case that wants to look into a
//! guest gives the VM one more, as a client of a socket of the lane: the QEMU
//! processes connect in the order in which they start, source first.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

/// How long QEMU may take to answer; `pmemsave` writes the whole memory.
const ANSWER_BOUND: Duration = Duration::from_secs(10);

/// What firmware owns below 1 MiB: it may differ between two ends that are both right.
const FIRMWARE: std::ops::Range<usize> = 0xe0000..0x10_0000;

/// Where the QEMU processes of one VM connect.
#[derive(Debug)]
pub struct Monitors {
    path: PathBuf,
    listener: UnixListener,
}

impl Monitors {
    /// Listens on `path`.
    ///
    /// # Errors
    ///
    /// Fails if the socket cannot be made.
    pub fn listen(path: &Path) -> Result<Self> {
        let listener =
            UnixListener::bind(path).with_context(|| format!("listen on {}", path.display()))?;
        Ok(Self { path: path.to_owned(), listener })
    }

    /// Returns the QEMU arguments that give a VM this monitor.
    #[must_use]
    pub fn qemu_arguments(&self) -> Vec<String> {
        let chardev = format!("socket,id=vfmonitor,path={}", self.path.display());
        [
            "-chardev".to_owned(),
            chardev,
            "-mon".to_owned(),
            "chardev=vfmonitor,mode=control".to_owned(),
        ]
        .into()
    }

    /// Takes the connection of the next QEMU process.
    ///
    /// # Errors
    ///
    /// Fails if none comes.
    pub async fn next(&self) -> Result<Monitor> {
        let accepted = tokio::time::timeout(ANSWER_BOUND, self.listener.accept()).await;
        let (stream, _) =
            accepted.context("wait for a QEMU process to connect")?.context("accept")?;
        let mut monitor = Monitor { stream: BufReader::new(stream) };
        monitor.read().await.context("read the greeting")?;
        monitor.execute("qmp_capabilities", json!({})).await?;
        Ok(monitor)
    }
}

impl Drop for Monitors {
    fn drop(&mut self) {
        fs::remove_file(&self.path).ok();
    }
}

/// A monitor of one QEMU process.
#[derive(Debug)]
pub struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Carries out one command.
    ///
    /// # Errors
    ///
    /// Fails with QEMU's text if it refuses, or if it does not answer.
    pub async fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        self.stream.get_mut().write_all(line.as_bytes()).await.context("write to the monitor")?;
        loop {
            let answer = tokio::time::timeout(ANSWER_BOUND, self.read()).await;
            let mut answer =
                answer.with_context(|| format!("wait for the answer to {command}"))??;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    /// Saves the guest's memory to `path` and reads it.
    ///
    /// # Errors
    ///
    /// Fails where QEMU does.
    pub async fn memory(&mut self, bytes: u64, path: &Path) -> Result<Vec<u8>> {
        let arguments = json!({"val": 0, "size": bytes, "filename": path.display().to_string()});
        self.execute("pmemsave", arguments).await?;
        let memory = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        fs::remove_file(path).with_context(|| format!("remove {}", path.display()))?;
        Ok(memory)
    }

    async fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).await.context("read the monitor")? == 0 {
            bail!("QEMU closed its monitor");
        }
        serde_json::from_str(&line).context("read what QEMU said")
    }
}

/// Returns the pages in which two memories differ, outside what firmware owns.
#[must_use]
pub fn differing_pages(one: &[u8], other: &[u8]) -> Vec<usize> {
    const PAGE: usize = 4096;
    let shorter = one.len().min(other.len()) / PAGE;
    let longer = one.len().max(other.len()) / PAGE;
    let differs = |page: &usize| {
        let at = page * PAGE;
        !FIRMWARE.contains(&at) && one[at..at + PAGE] != other[at..at + PAGE]
    };
    (0..shorter).filter(differs).chain(shorter..longer).map(|page| page * PAGE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_differ_are_named_but_for_those_of_firmware() {
        let one = vec![0; 2 << 20];
        let mut other = one.clone();
        other[0xf0000] = 1;
        assert!(differing_pages(&one, &other).is_empty());
        other[0x10_0001] = 1;
        assert_eq!(differing_pages(&one, &other), [0x10_0000]);
        assert_eq!(differing_pages(&one, &one[..one.len() - 4096]), [(2 << 20) - 4096]);
    }
}
