//! One conversation with one monitor.
//!
//! ```text
//! AwaitingGreeting ──► Negotiating ──► Ready
//!         └──────────────────┴───────────┴──► Ended
//! ```
//!
//! The owner feeds bytes with [`Session::handle_bytes`], sends what
//! [`Session::poll_transmit`] returns, and takes what
//! [`Session::poll_output`] returns. Replies are matched by id, whatever
//! arrives in between. Out-of-band execution is negotiated where it is
//! offered: it cannot be added later, least of all when it is needed.

use std::collections::{BTreeSet, VecDeque};

use serde_json::{Value, json};

use crate::codec::{CodecError, Decoder, Greeting, Message, Refused, Reply, encode_command};
use crate::event::Event;

/// Names one request within a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(u64);

impl RequestId {
    /// The id as it stands on the wire.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// How QEMU executes a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Band {
    /// In the main loop, one after the other.
    In,
    /// At once, even while the main loop is stuck; few commands allow it.
    OutOf,
}

/// One line to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// The request the line belongs to.
    pub id: RequestId,
    /// The line, with its end.
    pub line: Vec<u8>,
}

/// What the session has to tell its owner.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Negotiation is done; requests are possible from now on.
    Ready(Greeting),
    /// QEMU reports an event.
    Event(Event),
    /// A request was answered.
    Reply {
        /// Which request.
        id: RequestId,
        /// The answer.
        result: Result<Value, Refused>,
    },
    /// Something that belongs to no request: worth a line in the log.
    Stray(Stray),
}

/// A message that fits no place in the conversation.
#[derive(Clone, Debug, PartialEq)]
pub enum Stray {
    /// A reply with an id that waits for none, or without an id.
    Reply(Reply),
    /// A greeting in mid-conversation.
    Greeting,
}

/// The conversation cannot go on, or could not be used as asked.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// What came is not QMP.
    #[error("the monitor sent what is not QMP")]
    Codec(#[source] CodecError),
    /// The first message was no greeting.
    #[error("the monitor sent {found} where its greeting was due")]
    NoGreeting {
        /// What came instead.
        found: &'static str,
    },
    /// `qmp_capabilities` was refused.
    #[error("the monitor refused the capability negotiation")]
    Negotiation(#[source] Refused),
    /// The other side closed the connection.
    #[error("the monitor closed the connection")]
    Closed,
    /// A request was made before negotiation was done, or after the end.
    #[error("the monitor session is not ready for `{command}`")]
    NotReady {
        /// The command.
        command: String,
    },
    /// An out-of-band request on a session without the capability.
    #[error("`{command}` cannot be sent out of band: the monitor did not offer it")]
    OutOfBandNotOffered {
        /// The command.
        command: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    AwaitingGreeting,
    Negotiating { greeting: Greeting, id: RequestId },
    Ready { oob: bool },
    Ended,
}

/// One conversation with one monitor, from greeting to end.
#[derive(Debug)]
pub struct Session {
    state: State,
    decoder: Decoder,
    next_id: u64,
    waiting: BTreeSet<RequestId>,
    transmits: VecDeque<Transmit>,
    outputs: VecDeque<Output>,
}

impl Default for Session {
    fn default() -> Self {
        Self::new()
    }
}

impl Session {
    /// Returns a session that waits for the greeting.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: State::AwaitingGreeting,
            decoder: Decoder::default(),
            next_id: 1,
            waiting: BTreeSet::new(),
            transmits: VecDeque::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Tells whether out-of-band requests are possible.
    #[must_use]
    pub fn oob(&self) -> bool {
        self.state == State::Ready { oob: true }
    }

    /// Returns how many requests wait for their reply.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes bytes that came from QEMU.
    ///
    /// # Errors
    ///
    /// Returns why the conversation is over. Outputs found before that are
    /// still there to be polled; nothing is answered any more.
    pub fn handle_bytes(&mut self, bytes: &[u8]) -> Result<(), SessionError> {
        if self.state == State::Ended {
            return Err(SessionError::Closed);
        }
        self.decoder.handle_bytes(bytes);
        loop {
            match self.decoder.poll_message() {
                Ok(Some(message)) => self.handle_message(message)?,
                Ok(None) => return Ok(()),
                Err(error) => return Err(self.end(SessionError::Codec(error))),
            }
        }
    }

    /// Takes the end of the stream and returns why the conversation is over.
    pub fn handle_eof(&mut self) -> SessionError {
        let error = match self.decoder.handle_eof() {
            Ok(()) => SessionError::Closed,
            Err(error) => SessionError::Codec(error),
        };
        self.end(error)
    }

    /// Asks for `command` to be sent and returns the id its reply will carry.
    ///
    /// # Errors
    ///
    /// Returns an error if the session is not ready, or if out-of-band
    /// execution was not negotiated. Nothing is sent then.
    pub fn request(
        &mut self,
        band: Band,
        command: &str,
        arguments: &Value,
    ) -> Result<RequestId, SessionError> {
        let State::Ready { oob } = self.state else {
            return Err(SessionError::NotReady { command: command.to_owned() });
        };
        let verb = match band {
            Band::In => "execute",
            Band::OutOf if oob => "exec-oob",
            Band::OutOf => {
                return Err(SessionError::OutOfBandNotOffered { command: command.to_owned() });
            }
        };
        Ok(self.transmit(verb, command, arguments))
    }

    /// Returns the next line to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// Returns the next thing QEMU had to say.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn transmit(&mut self, verb: &str, command: &str, arguments: &Value) -> RequestId {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.waiting.insert(id);
        let line = encode_command(verb, command, arguments, id.0);
        self.transmits.push_back(Transmit { id, line });
        id
    }

    fn handle_message(&mut self, message: Message) -> Result<(), SessionError> {
        match message {
            Message::Greeting(greeting) => {
                self.handle_greeting(greeting);
                Ok(())
            }
            Message::Event(event) => match self.state {
                State::AwaitingGreeting => Err(self.no_greeting("an event")),
                State::Negotiating { .. } | State::Ready { .. } | State::Ended => {
                    self.outputs.push_back(Output::Event(event));
                    Ok(())
                }
            },
            Message::Reply(reply) => self.handle_reply(reply),
        }
    }

    fn handle_greeting(&mut self, greeting: Greeting) {
        if self.state != State::AwaitingGreeting {
            self.outputs.push_back(Output::Stray(Stray::Greeting));
            return;
        }
        let arguments = if greeting.offers_oob() { json!({"enable": ["oob"]}) } else { json!({}) };
        let id = self.transmit("execute", "qmp_capabilities", &arguments);
        self.state = State::Negotiating { greeting, id };
    }

    fn handle_reply(&mut self, reply: Reply) -> Result<(), SessionError> {
        let known = reply.id.map(RequestId).filter(|id| self.waiting.remove(id));
        let Some(id) = known else {
            if self.state == State::AwaitingGreeting {
                return Err(self.no_greeting("a reply"));
            }
            self.outputs.push_back(Output::Stray(Stray::Reply(reply)));
            return Ok(());
        };
        let State::Negotiating { greeting, id: negotiation } = &self.state else {
            self.outputs.push_back(Output::Reply { id, result: reply.result });
            return Ok(());
        };
        // Nothing but the negotiation can wait in this state.
        assert_eq!(id, *negotiation, "a request was sent before the session was ready");
        let greeting = greeting.clone();
        match reply.result {
            Ok(_) => {
                self.state = State::Ready { oob: greeting.offers_oob() };
                self.outputs.push_back(Output::Ready(greeting));
                Ok(())
            }
            Err(refused) => Err(self.end(SessionError::Negotiation(refused))),
        }
    }

    fn no_greeting(&mut self, found: &'static str) -> SessionError {
        self.end(SessionError::NoGreeting { found })
    }

    fn end(&mut self, error: SessionError) -> SessionError {
        self.state = State::Ended;
        self.waiting.clear();
        self.transmits.clear();
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREETING: &[u8] =
        b"{\"QMP\":{\"version\":{\"qemu\":{\"micro\":2,\"minor\":0,\"major\":10},\
        \"package\":\"\"},\"capabilities\":[\"oob\"]}}\r\n";

    fn ready() -> Session {
        let mut session = Session::new();
        session.handle_bytes(GREETING).unwrap();
        let sent = session.poll_transmit().unwrap();
        let reply = format!("{{\"return\":{{}},\"id\":{}}}\n", sent.id.number());
        session.handle_bytes(reply.as_bytes()).unwrap();
        assert!(matches!(session.poll_output(), Some(Output::Ready(_))));
        session
    }

    #[test]
    fn oob_is_enabled_where_it_is_offered() {
        let mut session = Session::new();
        session.handle_bytes(GREETING).unwrap();
        let sent = String::from_utf8(session.poll_transmit().unwrap().line).unwrap();
        assert!(sent.contains("\"enable\":[\"oob\"]"), "{sent}");
        assert!(ready().oob());
    }

    #[test]
    fn an_old_monitor_is_not_asked_out_of_band() {
        let mut session = Session::new();
        session.handle_bytes(b"{\"QMP\":{\"capabilities\":[]}}\n").unwrap();
        session.poll_transmit().unwrap();
        session.handle_bytes(b"{\"return\":{},\"id\":1}\n").unwrap();
        let refused = session.request(Band::OutOf, "yank", &json!({}));
        assert!(matches!(refused, Err(SessionError::OutOfBandNotOffered { .. })));
    }

    #[test]
    fn replies_are_matched_by_id_whatever_comes_between() {
        let mut session = ready();
        let first = session.request(Band::In, "query-status", &json!({})).unwrap();
        let second = session.request(Band::OutOf, "query-yank", &json!({})).unwrap();
        session
            .handle_bytes(
                format!(
                    "{{\"event\":\"NOVELTY\",\"data\":3}}\n{{\"error\":{{\"class\":\"X\",\"desc\":\"y\"}}}}\n\
                     {{\"return\":[],\"id\":{}}}\n{{\"return\":{{}},\"id\":99}}\n{{\"return\":{{}},\"id\":{}}}\n",
                    second.number(),
                    first.number()
                )
                .as_bytes(),
            )
            .unwrap();
        assert!(matches!(session.poll_output(), Some(Output::Event(_))));
        assert!(matches!(session.poll_output(), Some(Output::Stray(Stray::Reply(_)))));
        assert_eq!(
            session.poll_output(),
            Some(Output::Reply { id: second, result: Ok(json!([])) })
        );
        assert!(matches!(session.poll_output(), Some(Output::Stray(Stray::Reply(_)))));
        assert_eq!(session.poll_output(), Some(Output::Reply { id: first, result: Ok(json!({})) }));
        assert_eq!(session.waiting(), 0);
    }

    #[test]
    fn nothing_is_sent_before_the_negotiation_is_done() {
        let mut session = Session::new();
        let early = session.request(Band::In, "cont", &json!({}));
        assert!(matches!(early, Err(SessionError::NotReady { .. })));
        assert_eq!(session.poll_transmit(), None);
    }

    #[test]
    fn what_was_said_before_the_end_is_not_lost() {
        let mut session = ready();
        let ended = session.handle_bytes(b"{\"event\":\"STOP\"}\nnonsense\n");
        assert!(matches!(ended, Err(SessionError::Codec(CodecError::NotJson { .. }))));
        assert!(matches!(session.poll_output(), Some(Output::Event(_))));
        assert!(matches!(session.handle_bytes(b""), Err(SessionError::Closed)));
    }

    #[test]
    fn a_refused_negotiation_names_the_refusal() {
        let mut session = Session::new();
        session.handle_bytes(GREETING).unwrap();
        let refusal = b"{\"error\":{\"class\":\"GenericError\",\"desc\":\"no\"},\"id\":1}\n";
        let ended = session.handle_bytes(refusal);
        assert!(matches!(ended, Err(SessionError::Negotiation(_))));
    }
}
