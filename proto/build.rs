//! Compiles the wire contract without `protoc`, and gives its messages the one JSON form that REST and the CLI share.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["v1/agent.proto", "v1/capacity.proto", "v1/planner.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure()
        .type_attribute(".", "#[derive(serde::Serialize, serde::Deserialize)]")
        .type_attribute(".", "#[serde(rename_all = \"snake_case\")]")
        .message_attribute(".", "#[serde(default, deny_unknown_fields)]")
        .btree_map(".")
        .compile_fds(descriptors)?;
    Ok(())
}
