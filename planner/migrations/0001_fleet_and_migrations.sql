-- Hosts as their agents introduced themselves. Liveness is not here: it is in memory, from reports.
CREATE TABLE hosts (
    id               TEXT   NOT NULL PRIMARY KEY,
    name             TEXT   NOT NULL UNIQUE,
    boot_id          TEXT   NOT NULL,
    agent_address    TEXT   NOT NULL,
    last_report_ms   BIGINT NOT NULL,
    declared_dead_ms BIGINT
);

-- A host takes placements only while no row holds it back.
CREATE TABLE cordons (
    host       TEXT   NOT NULL,
    owner      TEXT   NOT NULL,
    reason     TEXT   NOT NULL,
    since_ms   BIGINT NOT NULL,
    expires_ms BIGINT,
    PRIMARY KEY (host, owner)
);

-- What the planner holds to be true of each VM. `admission` is the one open admission, if any:
-- a migration, a start or a stop; that is what makes them single-flight.
CREATE TABLE vms (
    id               TEXT   NOT NULL PRIMARY KEY,
    name             TEXT   NOT NULL,
    host             TEXT,
    power            TEXT   NOT NULL
        CHECK (power IN ('stopped', 'starting', 'running', 'stopping', 'lost')),
    generation       BIGINT NOT NULL,
    claim            BIGINT NOT NULL,
    admission        TEXT,
    error            TEXT   NOT NULL,
    definition       TEXT   NOT NULL,
    resolved_machine TEXT   NOT NULL,
    memory_bytes     BIGINT NOT NULL,
    cpu_milli        BIGINT NOT NULL,
    updated_ms       BIGINT NOT NULL
);
CREATE INDEX vms_by_name ON vms (name);
CREATE INDEX vms_by_host ON vms (host);

-- Capacity that is promised. Closed once, never deleted with its admission open.
CREATE TABLE reservations (
    admission    TEXT   NOT NULL,
    host         TEXT   NOT NULL,
    vm_id        TEXT   NOT NULL,
    memory_bytes BIGINT NOT NULL,
    cpu_milli    BIGINT NOT NULL,
    opened_ms    BIGINT NOT NULL,
    closed_ms    BIGINT,
    PRIMARY KEY (admission, host)
);
CREATE INDEX reservations_open ON reservations (host) WHERE closed_ms IS NULL;

-- Columns for what is queried, the whole record once, as JSON.
CREATE TABLE migrations (
    id             TEXT   NOT NULL PRIMARY KEY,
    request_id     TEXT   UNIQUE,
    vm_id          TEXT   NOT NULL,
    vm_name        TEXT   NOT NULL,
    source         TEXT   NOT NULL,
    destination    TEXT,
    phase          TEXT   NOT NULL
        CHECK (phase IN ('queued', 'admitted', 'captured', 'restored', 'committed', 'attached',
                         'done', 'rolling_back', 'aborted', 'failed')),
    generation     BIGINT NOT NULL,
    claim          BIGINT NOT NULL,
    seq            BIGINT NOT NULL,
    lease_owner    TEXT,
    lease_until_ms BIGINT NOT NULL,
    created_us     BIGINT NOT NULL,
    updated_us     BIGINT NOT NULL,
    ended_us       BIGINT,
    record         TEXT   NOT NULL
);
CREATE INDEX migrations_open ON migrations (created_us) WHERE ended_us IS NULL;
CREATE INDEX migrations_by_vm ON migrations (vm_id, created_us);

-- One row an event, in the transaction of the row that it led to.
CREATE TABLE migration_log (
    migration_id TEXT   NOT NULL,
    seq          BIGINT NOT NULL,
    at_us        BIGINT NOT NULL,
    event        TEXT   NOT NULL,
    phase        TEXT   NOT NULL,
    note         TEXT   NOT NULL,
    body         TEXT   NOT NULL,
    PRIMARY KEY (migration_id, seq)
);

-- Starts and stops: admissions like migrations, with one host.
CREATE TABLE power_actions (
    id             TEXT   NOT NULL PRIMARY KEY,
    request_id     TEXT   UNIQUE,
    vm_id          TEXT   NOT NULL,
    host           TEXT   NOT NULL,
    kind           TEXT   NOT NULL CHECK (kind IN ('start', 'stop')),
    state          TEXT   NOT NULL CHECK (state IN ('open', 'done', 'failed')),
    generation     BIGINT NOT NULL,
    claim          BIGINT NOT NULL,
    seq            BIGINT NOT NULL,
    lease_owner    TEXT,
    lease_until_ms BIGINT NOT NULL,
    created_us     BIGINT NOT NULL,
    ended_us       BIGINT,
    record         TEXT   NOT NULL
);
CREATE INDEX power_actions_open ON power_actions (created_us) WHERE ended_us IS NULL;
