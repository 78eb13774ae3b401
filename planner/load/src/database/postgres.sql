-- Notes each write of a migration with the session that made it.
CREATE TABLE load_writes (
    number       BIGSERIAL PRIMARY KEY,
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
CREATE FUNCTION load_note_write() RETURNS trigger AS $$
BEGIN
    INSERT INTO load_writes (at_ms, writer, migration, phase_before, claim_before, claim,
                             seq_before, seq, owner_before, owner, until_before, until_ms)
    VALUES (floor(extract(epoch FROM clock_timestamp()) * 1000),
            current_setting('application_name'), OLD.id, OLD.phase, OLD.claim, NEW.claim,
            OLD.seq, NEW.seq, coalesce(OLD.lease_owner, ''), coalesce(NEW.lease_owner, ''),
            OLD.lease_until_ms, NEW.lease_until_ms);
    RETURN NULL;
END
$$ LANGUAGE plpgsql;
CREATE TRIGGER load_writes AFTER UPDATE ON migrations
    FOR EACH ROW EXECUTE FUNCTION load_note_write();

-- Counters of a VM that go back.
CREATE TABLE load_backwards (what TEXT NOT NULL);
CREATE FUNCTION load_note_backwards() RETURNS trigger AS $$
BEGIN
    INSERT INTO load_backwards
    VALUES (OLD.name || ': generation ' || OLD.generation || ' to ' || NEW.generation
            || ', claim ' || OLD.claim || ' to ' || NEW.claim
            || ' by ' || current_setting('application_name'));
    RETURN NULL;
END
$$ LANGUAGE plpgsql;
CREATE TRIGGER load_backwards AFTER UPDATE ON vms FOR EACH ROW
    WHEN (NEW.generation < OLD.generation OR NEW.claim < OLD.claim)
    EXECUTE FUNCTION load_note_backwards();
