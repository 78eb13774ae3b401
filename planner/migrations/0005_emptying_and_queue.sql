-- What empties a host: maintenance jobs, drains and retirements. `lifecycle` is what the host is to
-- everyone else for its sake, `driven` whether anything is owed.
CREATE TABLE emptyings (
    id             TEXT   NOT NULL PRIMARY KEY,
    host           TEXT   NOT NULL,
    kind           TEXT   NOT NULL CHECK (kind IN ('maintenance', 'drain', 'retire')),
    phase          TEXT   NOT NULL
        CHECK (phase IN ('PLANNED', 'BLOCKED', 'RUNNING', 'MAINTENANCE', 'COMPLETED', 'FAILED',
                         'CANCELLED', 'EMPTYING', 'EMPTY', 'GRANTED', 'DIED')),
    lifecycle      TEXT   NOT NULL
        CHECK (lifecycle IN ('active', 'draining', 'maintenance', 'retired')),
    driven         BIGINT NOT NULL CHECK (driven IN (0, 1)),
    claim          BIGINT NOT NULL,
    seq            BIGINT NOT NULL,
    lease_owner    TEXT,
    lease_until_ms BIGINT NOT NULL,
    created_us     BIGINT NOT NULL,
    updated_us     BIGINT NOT NULL,
    ended_us       BIGINT,
    record         TEXT   NOT NULL
);
CREATE INDEX emptyings_by_host ON emptyings (host, created_us);
CREATE INDEX emptyings_open ON emptyings (created_us) WHERE ended_us IS NULL;
CREATE INDEX emptyings_driven ON emptyings (created_us) WHERE driven = 1;

-- One row an event, in the transaction of the row that it led to.
CREATE TABLE emptying_log (
    emptying_id TEXT   NOT NULL,
    seq         BIGINT NOT NULL,
    at_us       BIGINT NOT NULL,
    event       TEXT   NOT NULL,
    phase       TEXT   NOT NULL,
    body        TEXT   NOT NULL,
    PRIMARY KEY (emptying_id, seq)
);

-- For whose sake a migration was asked for, which emptying began it (empty: none), and whether its memory may cross: `wanted` by whom it
-- waits for a link, `held` by whom it has one. Of those that wait, who was not seen lately is passed.
ALTER TABLE migrations ADD COLUMN priority TEXT NOT NULL DEFAULT 'operator'
    CHECK (priority IN ('maintenance', 'drain', 'operator'));
ALTER TABLE migrations ADD COLUMN emptying TEXT NOT NULL DEFAULT '';
ALTER TABLE migrations ADD COLUMN slot TEXT CHECK (slot IN ('wanted', 'held'));
ALTER TABLE migrations ADD COLUMN slot_ms BIGINT;
ALTER TABLE migrations ADD COLUMN slot_seen_ms BIGINT;
CREATE INDEX migrations_by_emptying ON migrations (emptying)
    WHERE emptying <> '' AND ended_us IS NULL;

-- VMs that are to be started and for which no host has room. The VM's row names it as its admission;
-- admitted, it is a start under the same id.
CREATE TABLE queued_starts (
    id               TEXT   NOT NULL PRIMARY KEY,
    request_id       TEXT   UNIQUE,
    vm_id            TEXT   NOT NULL,
    asked_host       TEXT,
    priority         TEXT   NOT NULL CHECK (priority IN ('maintenance', 'drain', 'operator')),
    seq              BIGINT NOT NULL,
    asked_us         BIGINT NOT NULL,
    blocked_since_ms BIGINT NOT NULL,
    deadline_ms      BIGINT NOT NULL,
    note             TEXT   NOT NULL,
    ended_us         BIGINT,
    outcome          TEXT   NOT NULL
);
CREATE INDEX queued_starts_open ON queued_starts (asked_us) WHERE ended_us IS NULL;

-- A host that was deleted and whose agent still reports from the same boot is not taken back: it has
-- yet to be switched off.
CREATE TABLE deleted_hosts (
    id         TEXT   NOT NULL PRIMARY KEY,
    boot_id    TEXT   NOT NULL,
    deleted_ms BIGINT NOT NULL
);
