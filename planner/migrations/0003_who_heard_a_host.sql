-- Which planner heard a host last, and when: written now and then only, where several planners
-- share the store. One of them that hears a host no more cannot tell whether the others do.
ALTER TABLE hosts ADD COLUMN heard_ms BIGINT;
ALTER TABLE hosts ADD COLUMN heard_by TEXT;
