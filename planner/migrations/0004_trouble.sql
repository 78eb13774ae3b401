-- What keeps a migration from going on, as its driver saw it last: other planners show it too.
ALTER TABLE migrations ADD COLUMN trouble TEXT;
ALTER TABLE migrations ADD COLUMN trouble_ms BIGINT;
