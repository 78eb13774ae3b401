//! The store in memory keeps what every store promises: else the simulation would show nothing.

use std::sync::Arc;

use vmferry_planner::store::Store;

async fn fresh() -> (Arc<dyn Store>, ()) {
    (vmferry_sim::in_fair_weather(), ())
}

vmferry_planner::store_contract! { fresh }
