//! `vmferry queue`.

use crate::client::Client;
use crate::failure::Failure;
use crate::output::Output;
use crate::render;

/// Lists what waits for room.
pub(crate) async fn run(client: &Client, output: &Output) -> Result<(), Failure> {
    let reply = client.queue().await?;
    output.answer(&reply, |reply| render::emptying::queue(&reply.entries));
    Ok(())
}
