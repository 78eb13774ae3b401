//! Messages over gRPC, of any bytes.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use prost::Message;
use prost::bytes::{Buf as _, BufMut as _};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use vmferry_proto::v1::ErrorDetail;

use super::Reaction;
use super::dice::Dice;
use super::noise;

/// How long the caller waits for the first answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// One call.
#[derive(Clone, Debug)]
pub struct Call {
    path: String,
    message: Vec<u8>,
    form: Form,
}

/// What is right about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Its form: the refusal has to say what is wrong, in the service's words.
    Whole,
    /// Nothing: whatever the gRPC library makes of it.
    Broken,
}

impl Call {
    /// Makes a call with a whole message.
    pub fn new(path: &str, message: &impl Message) -> Self {
        Self { path: path.to_owned(), message: message.encode_to_vec(), form: Form::Whole }
    }

    /// Breaks the message. What is left of it may be whole again, and mean something else.
    pub(super) fn break_it(mut self, dice: &mut Dice) -> Self {
        match dice.below(3) {
            0 => {
                let length = u64::try_from(self.message.len()).unwrap_or_default();
                self.message.truncate(dice.length(length + 1));
            }
            1 => self.message = noise::protobuf(dice, 6),
            _ => {
                for _ in 0..3 {
                    let length = u64::try_from(self.message.len()).unwrap_or_default();
                    if length > 0 {
                        let at = dice.length(length);
                        self.message[at] = dice.byte();
                    }
                }
            }
        }
        self.form = Form::Broken;
        self
    }

    /// Makes a call of bytes that are no message of the method, or of a method that is not there.
    pub(super) fn broken(path: &str, message: Vec<u8>) -> Self {
        Self { path: path.to_owned(), message, form: Form::Broken }
    }
}

/// Sends and takes bytes as they are.
#[derive(Clone, Copy, Debug, Default)]
struct Plain;

impl Codec for Plain {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Plain {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Plain {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let count = from.remaining();
        Ok(Some(from.copy_to_bytes(count).to_vec()))
    }
}

/// Prepares a connection.
pub(super) fn channel(address: &str) -> Result<Channel> {
    let endpoint =
        Endpoint::from_shared(format!("http://{address}")).context("read the address")?;
    Ok(endpoint.connect_timeout(Duration::from_secs(2)).connect_lazy())
}

/// Calls and returns the first message, or the refusal. Streams are dropped after it.
async fn first(channel: &Channel, path: &str, message: &[u8]) -> Result<Vec<u8>, Status> {
    let path = PathAndQuery::try_from(path)
        .map_err(|error| Status::cancelled(format!("no path: {error}")))?;
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let request = Request::new(message.to_vec());
    let mut stream = grpc.server_streaming(request, path, Plain).await?.into_inner();
    Ok(stream.message().await?.unwrap_or_default())
}

/// Calls and judges the answer.
pub(super) async fn send(channel: &Channel, call: &Call) -> Result<Reaction> {
    match tokio::time::timeout(PATIENCE, first(channel, &call.path, &call.message)).await {
        Err(_) => Ok(Reaction::Left),
        Ok(Ok(_)) => Ok(Reaction::Answered("OK".to_owned())),
        Ok(Err(status)) => judge(call, &status),
    }
}

/// Fails if a refusal tells its reader nothing.
fn judge(call: &Call, status: &Status) -> Result<Reaction> {
    let reaction = Reaction::Answered(format!("{:?}", status.code()));
    if call.form == Form::Broken {
        return Ok(reaction);
    }
    let sent = call.message.len();
    let refused = || format!("{} ({sent} bytes) was answered with {status}", call.path);
    // What is too large for any message is refused before the service sees it.
    if status.code() == Code::OutOfRange {
        return Ok(reaction);
    }
    if matches!(status.code(), Code::Internal | Code::Unknown) {
        bail!("the service blames itself: {}", refused());
    }
    let detail = ErrorDetail::decode(status.details()).with_context(refused)?;
    if detail.code.is_empty() || status.message().is_empty() {
        bail!("a refusal without code or message: {}", refused());
    }
    if status.code() == Code::InvalidArgument && detail.field.is_empty() {
        bail!("a refusal that does not name the field: {}", refused());
    }
    Ok(reaction)
}

/// Fails unless a call without a message is answered.
pub(super) async fn expect_ok(address: &str, path: &str) -> Result<()> {
    first(&channel(address)?, path, &[]).await.map(drop).with_context(|| path.to_owned())
}
