-- What is known of a host's death, besides when it was declared: of which boot, by whom and why.
-- It proves gone what ran under that boot, unless the host was heard from the same boot again.
ALTER TABLE hosts ADD COLUMN dead_boot_id TEXT;
ALTER TABLE hosts ADD COLUMN dead_by TEXT;
ALTER TABLE hosts ADD COLUMN dead_kind TEXT CHECK (dead_kind IN ('operator', 'fence_command'));
ALTER TABLE hosts ADD COLUMN dead_reason TEXT;
ALTER TABLE hosts ADD COLUMN dead_evidence TEXT;
ALTER TABLE hosts ADD COLUMN dead_void_ms BIGINT;
UPDATE hosts SET dead_boot_id = boot_id, dead_by = '', dead_kind = 'operator', dead_reason = '',
                 dead_evidence = ''
WHERE declared_dead_ms IS NOT NULL;

-- A deleted VM is not listed any more. Its row stays, for it proves the newest generation and claim.
ALTER TABLE vms ADD COLUMN deleted_ms BIGINT;

-- Rows that are held while something is decided that no single row stands for: placements on one
-- host, or the VMs of one name.
CREATE TABLE locks (
    name TEXT NOT NULL PRIMARY KEY
);
