//! Bytes to messages.
//!
//! A [`Decoder`] takes bytes as they come off a socket, in pieces of any size,
//! and yields one [`Message`] per line. Whatever is not QMP is an error that
//! names itself; after one the stream has no known position any more, so the
//! decoder keeps answering with nothing.

use serde_json::{Map, Value};

use crate::event::Event;

/// How long one line may be, in bytes.
///
/// The longest real reply is `query-qmp-schema` with some 200 KB, and
/// `human-monitor-command` may exceed it. 16 MiB is far above both and still
/// small enough that a peer gone mad cannot eat the host.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// How much of an unreadable line an error quotes, in characters.
const EXCERPT_CHARS: usize = 80;

/// What came off the wire cannot be QMP.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// A line exceeds [`LINE_BYTES_MAX`].
    #[error("a line of more than {bytes_max} bytes")]
    LineTooLong {
        /// The bound that was exceeded.
        bytes_max: usize,
    },
    /// A line is not UTF-8.
    #[error("a line that is not UTF-8 from byte {valid_up_to} on: {excerpt:?}")]
    NotUtf8 {
        /// How many bytes were fine.
        valid_up_to: usize,
        /// The line's beginning, with replacement characters.
        excerpt: String,
    },
    /// A line is not JSON.
    #[error("a line that is not JSON: {excerpt:?}")]
    NotJson {
        /// The line's beginning.
        excerpt: String,
        /// Where the parser stopped.
        #[source]
        source: serde_json::Error,
    },
    /// A line is JSON, but neither greeting, event nor reply.
    #[error("a line that is no QMP message: {excerpt:?}")]
    NotAMessage {
        /// The line's beginning.
        excerpt: String,
    },
    /// The stream ended within a line.
    #[error("the stream ended within a line, after {bytes} bytes of it: {excerpt:?}")]
    HalfLine {
        /// How many bytes of the line had come.
        bytes: usize,
        /// The line's beginning, with replacement characters.
        excerpt: String,
    },
}

/// One line from QEMU.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The first line of a connection.
    Greeting(Greeting),
    /// Something happened.
    Event(Event),
    /// A command was answered.
    Reply(Reply),
}

/// The first line of a connection: who speaks, and what it can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// QEMU's version. `None` if the greeting carries none that we understand.
    pub version: Option<Version>,
    /// The distribution's name for its build, as in `Debian 1:10.0.2+ds-2`.
    pub package: String,
    /// What may be negotiated, such as `oob`.
    pub capabilities: Vec<String>,
}

impl Greeting {
    /// Tells whether out-of-band commands are offered.
    #[must_use]
    pub fn offers_oob(&self) -> bool {
        self.capabilities.iter().any(|capability| capability == "oob")
    }
}

/// A QEMU version, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
    /// The third number.
    pub micro: u32,
}

/// The answer to one command.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The id of the command. `None` if QEMU could not read the command at
    /// all, or if the id is not one of ours.
    pub id: Option<u64>,
    /// What QEMU returned, or why it refused.
    pub result: Result<Value, Refused>,
}

/// QEMU refused a command.
///
/// The class is text, since a newer QEMU may know more of them. The
/// description is for people: it is shown, never parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{class}: {description}")]
pub struct Refused {
    /// QEMU's error class, such as `GenericError` or `CommandNotFound`.
    pub class: String,
    /// QEMU's own text.
    pub description: String,
}

impl Refused {
    /// Tells whether this QEMU does not know the command.
    #[must_use]
    pub fn unknown_command(&self) -> bool {
        self.class == "CommandNotFound"
    }
}

/// Cuts a byte stream into lines and reads them.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Where in `buffer` the next line begins.
    start: usize,
    /// Up to where `buffer` is known to hold no line end.
    scanned: usize,
    failed: bool,
}

impl Decoder {
    /// Takes the next bytes of the stream.
    pub fn handle_bytes(&mut self, bytes: &[u8]) {
        if !self.failed {
            self.buffer.extend_from_slice(bytes);
        }
    }

    /// Returns the next message, or `None` if its line is not complete yet.
    ///
    /// # Errors
    ///
    /// Returns why the stream is not QMP. It has no known position then, and
    /// nothing more is decoded.
    pub fn poll_message(&mut self) -> Result<Option<Message>, CodecError> {
        while let Some(end) = self.line_end()? {
            let line = self.buffer.get(self.start..end).unwrap_or_default();
            let message = decode_line(line);
            self.start = end + 1;
            self.scanned = self.start;
            match message {
                Ok(None) => {}
                Ok(Some(message)) => return Ok(Some(message)),
                Err(error) => return Err(self.fail(error)),
            }
        }
        self.forget_read();
        Ok(None)
    }

    /// Takes the end of the stream.
    ///
    /// # Errors
    ///
    /// Returns [`CodecError::HalfLine`] if it came within a line.
    pub fn handle_eof(&mut self) -> Result<(), CodecError> {
        let rest = self.buffer.get(self.start..).unwrap_or_default();
        if self.failed || rest.iter().all(u8::is_ascii_whitespace) {
            return Ok(());
        }
        let error = CodecError::HalfLine {
            bytes: rest.len(),
            excerpt: excerpt(&String::from_utf8_lossy(rest)),
        };
        Err(self.fail(error))
    }

    fn line_end(&mut self) -> Result<Option<usize>, CodecError> {
        let unread = self.buffer.get(self.scanned..).unwrap_or_default();
        let end = unread.iter().position(|&byte| byte == b'\n').map(|at| self.scanned + at);
        let line_bytes = end.unwrap_or(self.buffer.len()).saturating_sub(self.start);
        if line_bytes > LINE_BYTES_MAX {
            return Err(self.fail(CodecError::LineTooLong { bytes_max: LINE_BYTES_MAX }));
        }
        if end.is_none() {
            self.scanned = self.buffer.len();
        }
        Ok(end)
    }

    fn forget_read(&mut self) {
        self.buffer.drain(..self.start.min(self.buffer.len()));
        self.scanned = self.scanned.saturating_sub(self.start);
        self.start = 0;
        // One schema dump must not keep its memory for the life of the VM.
        if self.buffer.is_empty() && self.buffer.capacity() > 64 << 10 {
            self.buffer.shrink_to(4 << 10);
        }
    }

    fn fail(&mut self, error: CodecError) -> CodecError {
        *self = Self { failed: true, ..Self::default() };
        error
    }
}

/// Writes one command as a line.
#[must_use]
pub fn encode_command(verb: &str, name: &str, arguments: &Value, id: u64) -> Vec<u8> {
    let mut line = Map::new();
    line.insert(verb.to_owned(), Value::from(name));
    // `null` and `{}` mean the same to us; QEMU accepts only an object.
    if arguments.as_object().is_some_and(|object| !object.is_empty()) {
        line.insert("arguments".to_owned(), arguments.clone());
    }
    line.insert("id".to_owned(), Value::from(id));
    let mut bytes = Value::Object(line).to_string().into_bytes();
    bytes.push(b'\n');
    bytes
}

fn decode_line(line: &[u8]) -> Result<Option<Message>, CodecError> {
    let text = std::str::from_utf8(line).map_err(|error| CodecError::NotUtf8 {
        valid_up_to: error.valid_up_to(),
        excerpt: excerpt(&String::from_utf8_lossy(line)),
    })?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    let value: Value = serde_json::from_str(text)
        .map_err(|source| CodecError::NotJson { excerpt: excerpt(text), source })?;
    match value {
        Value::Object(object) => classify(object),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            None
        }
    }
    .map(Some)
    .ok_or_else(|| CodecError::NotAMessage { excerpt: excerpt(text) })
}

fn classify(mut object: Map<String, Value>) -> Option<Message> {
    if let Some(name) = object.get("event").and_then(Value::as_str) {
        let name = name.to_owned();
        return Some(Message::Event(Event::from_wire(name, &mut object)));
    }
    if let Some(greeting) = object.get("QMP") {
        return Some(Message::Greeting(read_greeting(greeting)));
    }
    let id = object.get("id").and_then(Value::as_u64);
    if let Some(value) = object.remove("return") {
        return Some(Message::Reply(Reply { id, result: Ok(value) }));
    }
    let error = object.get("error")?;
    let text = |key| error.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let refused = Refused { class: text("class"), description: text("desc") };
    Some(Message::Reply(Reply { id, result: Err(refused) }))
}

fn read_greeting(greeting: &Value) -> Greeting {
    let number = |key| {
        let value = greeting.pointer("/version/qemu")?.get(key)?;
        u32::try_from(value.as_u64()?).ok()
    };
    let version = || {
        Some(Version { major: number("major")?, minor: number("minor")?, micro: number("micro")? })
    };
    let package = greeting.pointer("/version/package").and_then(Value::as_str).unwrap_or_default();
    let capabilities = greeting.get("capabilities").and_then(Value::as_array);
    Greeting {
        version: version(),
        package: package.to_owned(),
        capabilities: capabilities
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect(),
    }
}

fn excerpt(text: &str) -> String {
    text.chars().take(EXCERPT_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8]) -> Result<Vec<Message>, CodecError> {
        let mut decoder = Decoder::default();
        decoder.handle_bytes(bytes);
        let mut messages = Vec::new();
        while let Some(message) = decoder.poll_message()? {
            messages.push(message);
        }
        decoder.handle_eof()?;
        Ok(messages)
    }

    #[test]
    fn a_line_may_come_byte_by_byte() {
        let mut decoder = Decoder::default();
        let line = "{\"return\": {\"name\": \"gäst\"}, \"id\": 7}\r\n".as_bytes();
        for (at, byte) in line.iter().enumerate() {
            decoder.handle_bytes(&[*byte]);
            let message = decoder.poll_message().unwrap();
            assert_eq!(message.is_some(), at + 1 == line.len(), "after byte {at}");
        }
    }

    #[test]
    fn blank_lines_are_no_messages() {
        assert_eq!(decode(b"\r\n\n  \n").unwrap(), vec![]);
    }

    #[test]
    fn junk_names_itself() {
        assert!(matches!(decode(b"hello\n"), Err(CodecError::NotJson { .. })));
        assert!(matches!(decode(b"[1]\n"), Err(CodecError::NotAMessage { .. })));
        assert!(matches!(decode(b"{\"x\":1}\n"), Err(CodecError::NotAMessage { .. })));
        assert!(matches!(decode(b"{\"id\xff\":1}\n"), Err(CodecError::NotUtf8 { .. })));
        assert!(matches!(decode(b"{\"return\":"), Err(CodecError::HalfLine { bytes: 10, .. })));
        assert!(matches!(decode(b"\xc3"), Err(CodecError::HalfLine { .. })));
    }

    #[test]
    fn a_line_without_end_is_refused_at_the_bound() {
        let mut decoder = Decoder::default();
        let piece = vec![b' '; 1 << 20];
        let mut error = None;
        for _ in 0..20 {
            decoder.handle_bytes(&piece);
            if let Err(found) = decoder.poll_message() {
                error = Some(found);
                break;
            }
        }
        assert!(matches!(error, Some(CodecError::LineTooLong { .. })));
        decoder.handle_bytes(b"{\"return\":{}}\n");
        assert_eq!(decoder.poll_message().unwrap(), None, "nothing is read after a failure");
    }

    #[test]
    fn an_error_without_id_is_a_reply_without_id() {
        let line = b"{\"error\":{\"class\":\"Novel\",\"desc\":\"JSON parse error\"}}\n";
        let refused = Refused { class: "Novel".into(), description: "JSON parse error".into() };
        let reply = Reply { id: None, result: Err(refused) };
        assert_eq!(decode(line).unwrap(), vec![Message::Reply(reply)]);
    }

    #[test]
    fn a_greeting_of_another_shape_is_still_a_greeting() {
        let messages =
            decode(b"{\"QMP\":{\"version\":\"11\",\"capabilities\":[\"oob\",3]}}\n").unwrap();
        let [Message::Greeting(greeting)] = messages.as_slice() else {
            panic!("no greeting in {messages:?}");
        };
        assert!(greeting.offers_oob());
        assert_eq!(greeting.version, None);
    }
}
