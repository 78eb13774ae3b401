//! The planner as its users and its agents see it: real store, real edges, fake agents.

#[cfg(test)]
mod bench;
#[cfg(test)]
mod capacity;
#[cfg(test)]
mod cold;
#[cfg(test)]
mod converge;
#[cfg(test)]
mod crashes;
#[cfg(test)]
mod fleet;
#[cfg(test)]
mod held;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod migrations;
#[cfg(test)]
mod native;
#[cfg(test)]
mod operator;
#[cfg(test)]
mod planners;
#[cfg(test)]
#[cfg(feature = "fault-points")]
mod points;
#[cfg(test)]
mod promises;
#[cfg(test)]
mod rest;
#[cfg(test)]
mod told;
#[cfg(test)]
mod turns;
#[cfg(test)]
mod waiting;
#[cfg(test)]
mod world;
