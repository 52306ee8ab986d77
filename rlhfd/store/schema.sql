-- rlhfd.db, schema 1. Times are µs UTC, sizes bytes, lengths tokens. Blobs of token ids are int32, of log-probs float32,
-- little-endian. Transitions are guarded compare-and-set updates (core/lifecycle.py lists them); what must never be true
-- is forbidden here.

CREATE TABLE daemon (
  id INTEGER PRIMARY KEY CHECK(id=1),
  epoch INTEGER NOT NULL,
  boot_id TEXT NOT NULL,
  pid INTEGER NOT NULL,
  version TEXT NOT NULL,
  started_us INTEGER NOT NULL,
  clean_exit INTEGER NOT NULL CHECK(clean_exit IN (0,1))
) STRICT;

-- Every process started, until it is known to be gone: what a new epoch sweeps.
CREATE TABLE child (
  pid INTEGER NOT NULL,
  session_id INTEGER NOT NULL,
  started_ticks INTEGER NOT NULL,
  boot_id TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  job_id INTEGER,
  role TEXT NOT NULL,
  PRIMARY KEY(pid, started_ticks, boot_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE job (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  submit_key TEXT NOT NULL UNIQUE,
  name TEXT NOT NULL,
  spec TEXT NOT NULL,                       -- the resolved job as JSON
  spec_sha TEXT NOT NULL,
  facts TEXT NOT NULL,                      -- what the inspection found: model, prompt snapshot, tokenizer (JSON)
  state TEXT NOT NULL CHECK(state IN ('queued','running','paused','done','failed','cancelled')),
  desired TEXT NOT NULL CHECK(desired IN ('run','pause','cancel')),
  priority INTEGER NOT NULL DEFAULT 0,
  after_id INTEGER REFERENCES job(id),
  owner_epoch INTEGER,
  attempt INTEGER NOT NULL DEFAULT 0,
  idle_attempts INTEGER NOT NULL DEFAULT 0, -- attempts since the last applied step
  step INTEGER NOT NULL DEFAULT 0,          -- last applied step
  max_steps INTEGER NOT NULL CHECK(max_steps>0),
  collected_tokens INTEGER NOT NULL DEFAULT 0, -- of rollouts that retention has deleted
  noise REAL,                               -- |engine - reference| of the start model's canary, mean
  reason TEXT,
  created_us INTEGER NOT NULL,
  updated_us INTEGER NOT NULL
) STRICT;

CREATE INDEX job_active ON job(state, priority DESC, id) WHERE state IN ('queued','running','paused');

CREATE TABLE policy_version (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  job_id INTEGER NOT NULL REFERENCES job(id),
  parent_id INTEGER REFERENCES policy_version(id),
  step INTEGER NOT NULL CHECK(step>=0),
  state TEXT NOT NULL CHECK(state IN ('trained','published','lost')),
  fingerprint TEXT,                         -- JSON; NULL for the start model
  created_us INTEGER NOT NULL
) STRICT;

CREATE UNIQUE INDEX pv_live ON policy_version(job_id, step) WHERE state<>'lost';

CREATE TABLE checkpoint (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  job_id INTEGER NOT NULL REFERENCES job(id),
  version_id INTEGER NOT NULL REFERENCES policy_version(id),
  dir TEXT NOT NULL UNIQUE,
  manifest_sha TEXT,
  bytes INTEGER,
  state TEXT NOT NULL CHECK(state IN ('writing','committed','deleting','bad')),
  created_us INTEGER NOT NULL,
  CHECK(state IN ('writing','deleting','bad') OR manifest_sha IS NOT NULL)
) STRICT;

CREATE TABLE grp (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  job_id INTEGER NOT NULL REFERENCES job(id),
  ordinal INTEGER NOT NULL CHECK(ordinal>=0),
  row INTEGER NOT NULL CHECK(row>=0),       -- of the prompt snapshot
  deadline INTEGER NOT NULL,                -- D = version at admission + max_staleness
  num_generations INTEGER NOT NULL CHECK(num_generations>0),
  state TEXT NOT NULL CHECK(state IN ('open','ready','reserved','consumed','dropped')),
  reason TEXT,                              -- why it was dropped
  admitted_step INTEGER NOT NULL,           -- V at admission
  UNIQUE(job_id, ordinal)
) STRICT;

CREATE INDEX grp_live ON grp(job_id, state) WHERE state IN ('open','ready','reserved');

CREATE TABLE rollout (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  grp_id INTEGER NOT NULL REFERENCES grp(id),
  k INTEGER NOT NULL CHECK(k>=0),
  purpose TEXT NOT NULL DEFAULT 'train' CHECK(purpose IN ('train','eval')),
  state TEXT NOT NULL CHECK(state IN ('pending','generating','partial','finished','scored','failed')),
  n_tokens INTEGER NOT NULL DEFAULT 0 CHECK(n_tokens>=0),
  min_step INTEGER,                         -- of the versions that sampled it
  max_step INTEGER,
  lease_epoch INTEGER,
  resumes INTEGER NOT NULL DEFAULT 0,
  finish TEXT CHECK(finish IN ('stop','length')),
  reward REAL,                              -- weighted sum; NULL until scored, and for ever when failed
  parts TEXT,                               -- JSON: reward name -> value
  text TEXT,                                -- decoded completion, kept for samples
  UNIQUE(grp_id, k),
  CHECK(state NOT IN ('finished','scored') OR finish IS NOT NULL),
  CHECK((state='scored') = (reward IS NOT NULL))
) STRICT;

CREATE TABLE chunk (
  rollout_id INTEGER NOT NULL REFERENCES rollout(id),
  start INTEGER NOT NULL CHECK(start>=0),
  n INTEGER NOT NULL CHECK(n>0),
  version_id INTEGER NOT NULL REFERENCES policy_version(id),
  tok BLOB NOT NULL,
  lp BLOB NOT NULL,
  UNIQUE(rollout_id, start),
  CHECK(length(tok)=4*n),
  CHECK(length(lp)=4*n)
) STRICT;

-- The redo log: what a step trains on and with is here before it is learned.
CREATE TABLE step (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  job_id INTEGER NOT NULL REFERENCES job(id),
  n INTEGER NOT NULL CHECK(n>0),
  version_in INTEGER REFERENCES policy_version(id), -- NULL while a step before it, recorded again, is to be learned
  version_out INTEGER REFERENCES policy_version(id),
  state TEXT NOT NULL CHECK(state IN ('recorded','applied','void')),
  seed INTEGER NOT NULL,
  max_staleness INTEGER NOT NULL CHECK(max_staleness>=0), -- the bound that its tokens were checked against
  settings TEXT NOT NULL,                   -- JSON of wire.StepSettings
  numerics TEXT NOT NULL,                   -- JSON of wire.Loaded.numerics
  fingerprint TEXT,                         -- JSON of wire.Fingerprint
  metrics TEXT,                             -- JSON, the row of `rlhfd metrics`
  recorded_us INTEGER NOT NULL,
  applied_us INTEGER,
  CHECK(state<>'applied' OR (version_in IS NOT NULL AND version_out IS NOT NULL AND fingerprint IS NOT NULL))
) STRICT;

CREATE UNIQUE INDEX step_live ON step(job_id, n) WHERE state<>'void';

CREATE TABLE step_grp (
  step_id INTEGER NOT NULL REFERENCES step(id),
  grp_id INTEGER NOT NULL REFERENCES grp(id),
  position INTEGER NOT NULL,
  void INTEGER NOT NULL DEFAULT 0 CHECK(void IN (0,1)),
  PRIMARY KEY(step_id, grp_id)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX one_live_use ON step_grp(grp_id) WHERE void=0;

CREATE TABLE step_rollout (
  step_id INTEGER NOT NULL REFERENCES step(id),
  rollout_id INTEGER NOT NULL REFERENCES rollout(id),
  advantage REAL NOT NULL,                  -- float64, as used
  minibatch INTEGER NOT NULL,
  micro_batch INTEGER NOT NULL,             -- -1: not forwarded
  masked INTEGER NOT NULL CHECK(masked IN (0,1)),
  skipped INTEGER NOT NULL CHECK(skipped IN (0,1)),
  PRIMARY KEY(step_id, rollout_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX step_rollout_rollout ON step_rollout(rollout_id); -- or deleting a rollout scans the table

-- What the learner used per token, for the few rollouts a step that `samples` shows; outlives the rollouts.
CREATE TABLE sample (
  step_id INTEGER NOT NULL REFERENCES step(id),
  rollout_id INTEGER NOT NULL,
  body TEXT NOT NULL,                       -- JSON, one object of `rlhfd samples`
  PRIMARY KEY(step_id, rollout_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE event (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  job_id INTEGER,
  epoch INTEGER NOT NULL,
  us INTEGER NOT NULL,
  kind TEXT NOT NULL,
  body TEXT NOT NULL                        -- JSON object
) STRICT;

CREATE INDEX event_job ON event(job_id, id);
