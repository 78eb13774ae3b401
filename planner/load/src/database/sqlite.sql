-- As for PostgreSQL; a file has one planner, so nobody has to be told apart.
CREATE TABLE load_writes (
    number       INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms        BIGINT NOT NULL,
    writer       TEXT   NOT NULL,
    migration    TEXT   NOT NULL,
    phase_before TEXT   NOT NULL,
    claim_before BIGINT NOT NULL,
    claim        BIGINT NOT NULL,
    seq_before   BIGINT NOT NULL,
    seq          BIGINT NOT NULL,
    owner_before TEXT   NOT NULL,
    owner        TEXT   NOT NULL,
    until_before BIGINT NOT NULL,
    until_ms     BIGINT NOT NULL
);
CREATE TRIGGER load_writes AFTER UPDATE ON migrations
BEGIN
    INSERT INTO load_writes (at_ms, writer, migration, phase_before, claim_before, claim,
                             seq_before, seq, owner_before, owner, until_before, until_ms)
    VALUES (CAST(unixepoch('now', 'subsec') * 1000 AS INTEGER), '', OLD.id, OLD.phase, OLD.claim,
            NEW.claim, OLD.seq, NEW.seq, coalesce(OLD.lease_owner, ''),
            coalesce(NEW.lease_owner, ''), OLD.lease_until_ms, NEW.lease_until_ms);
END;
CREATE TABLE load_backwards (what TEXT NOT NULL);
CREATE TRIGGER load_backwards AFTER UPDATE ON vms
    WHEN NEW.generation < OLD.generation OR NEW.claim < OLD.claim
BEGIN
    INSERT INTO load_backwards
    VALUES (OLD.name || ': generation ' || OLD.generation || ' to ' || NEW.generation
            || ', claim ' || OLD.claim || ' to ' || NEW.claim);
END;
