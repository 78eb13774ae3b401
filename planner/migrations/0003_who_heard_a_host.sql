-- When each planner heard a host last: written now and then only, where several planners share the
-- store. One of them that hears a host no more cannot tell whether the others do.
CREATE TABLE host_heard (
    host TEXT NOT NULL,
    planner TEXT NOT NULL,
    heard_ms BIGINT NOT NULL,
    PRIMARY KEY (host, planner)
);
