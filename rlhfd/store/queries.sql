-- Every statement of the store that is longer than a line, by name. :to and :sources come from core/lifecycle.py: a
-- move is `SET state = :to WHERE state IN (sources)`, and a count of 0 means that nothing has changed.

-- name: begin_epoch
INSERT INTO daemon (id, epoch, boot_id, pid, version, started_us, clean_exit)
VALUES (1, 1, :boot_id, :pid, :version, :now, 0)
ON CONFLICT (id) DO UPDATE SET
  epoch = epoch + 1, boot_id = :boot_id, pid = :pid, version = :version, started_us = :now, clean_exit = 0
RETURNING epoch;

-- name: park_rollouts
UPDATE rollout SET state = :to, lease_epoch = NULL WHERE state IN (SELECT value FROM json_each(:sources));

-- name: abandon_checkpoints
-- Files of a checkpoint that was not committed may be there: it is deleted like any other.
UPDATE checkpoint SET state = :to WHERE state = 'writing';

-- name: forgive_attempts
UPDATE job SET idle_attempts = 0 WHERE state = 'running';

-- name: insert_job
INSERT INTO job (submit_key, name, spec, spec_sha, facts, state, desired, priority, after_id, max_steps, created_us,
                 updated_us)
VALUES (:submit_key, :name, :spec, :spec_sha, :facts, :state, 'run', :priority, :after_id, :max_steps, :now, :now)
RETURNING *;

-- name: queue
SELECT * FROM job AS waiting
WHERE state IN ('queued', 'running', 'paused') AND state <> 'paused' AND desired = 'run'
  AND (state = 'queued' OR owner_epoch < :epoch)
  AND (after_id IS NULL OR (SELECT state FROM job WHERE id = waiting.after_id) = 'done')
ORDER BY state = 'running' DESC, priority DESC, id;

-- name: claim
UPDATE job SET state = :to, owner_epoch = :epoch, attempt = attempt + 1, idle_attempts = idle_attempts + 1,
  reason = NULL, updated_us = :now
WHERE id = :id AND desired = 'run' AND state IN (SELECT value FROM json_each(:sources))
  AND (state <> :to OR owner_epoch < :epoch)
  AND (after_id IS NULL OR (SELECT j.state FROM job AS j WHERE j.id = job.after_id) = 'done')
RETURNING *;

-- name: move_job
UPDATE job SET state = :to, reason = :reason, owner_epoch = NULL, updated_us = :now,
  desired = CASE WHEN :to = 'queued' THEN 'run' ELSE desired END,
  idle_attempts = CASE WHEN :to = 'queued' THEN 0 ELSE idle_attempts END
WHERE id = :id AND state IN (SELECT value FROM json_each(:sources))
RETURNING *;

-- name: dependents
WITH RECURSIVE dependent (id, cause) AS (
  SELECT id, after_id FROM job WHERE after_id = :id
  UNION
  SELECT job.id, job.after_id FROM job JOIN dependent ON job.after_id = dependent.id
)
SELECT dependent.id, dependent.cause FROM dependent JOIN job USING (id)
WHERE job.state IN (SELECT value FROM json_each(:sources))
ORDER BY dependent.id;

-- name: insert_version
INSERT INTO policy_version (job_id, parent_id, step, state, fingerprint, created_us)
VALUES (:job_id, :parent_id, :step, :state, :fingerprint, :now)
RETURNING *;

-- name: newest_version
SELECT * FROM policy_version
WHERE job_id = :job_id AND state <> 'lost' AND state IN (SELECT value FROM json_each(:states))
ORDER BY step DESC LIMIT 1;

-- name: publish
UPDATE policy_version SET state = :to
WHERE id = :id AND state IN (SELECT value FROM json_each(:sources)) AND NOT EXISTS (
  SELECT 1 FROM policy_version AS newer
  WHERE newer.job_id = policy_version.job_id AND newer.step > policy_version.step
    AND newer.state <> 'lost' AND newer.state = :to
)
RETURNING *;

-- name: insert_group
INSERT INTO grp (job_id, ordinal, row, deadline, num_generations, state, admitted_step)
VALUES (:job_id, :ordinal, :row, :deadline, :num_generations, :state, :admitted_step)
RETURNING id;

-- name: live_groups
SELECT * FROM grp
WHERE job_id = :job_id AND state IN ('open', 'ready', 'reserved') AND state <> 'reserved'
ORDER BY ordinal;

-- name: live_rollouts
SELECT rollout.id, grp_id, k, rollout.state, n_tokens, min_step, max_step, resumes, finish, reward, parts, NULL AS text
FROM grp JOIN rollout ON rollout.grp_id = grp.id
WHERE job_id = :job_id AND grp.state IN ('open', 'ready', 'reserved') AND grp.state <> 'reserved'
ORDER BY grp_id, k;

-- name: lease_rollout
UPDATE rollout SET state = :to, lease_epoch = :epoch, resumes = resumes + (state = 'partial')
WHERE id = :id AND state IN (SELECT value FROM json_each(:sources));

-- name: extend_rollout
UPDATE rollout SET n_tokens = n_tokens + :n, state = :to, finish = :finish,
  min_step = CASE WHEN :n = 0 THEN min_step ELSE min(coalesce(min_step, :step), :step) END,
  max_step = CASE WHEN :n = 0 THEN max_step ELSE max(coalesce(max_step, :step), :step) END
WHERE id = :id AND n_tokens = :start AND state IN (SELECT value FROM json_each(:sources));

-- name: version_step
SELECT step FROM policy_version
WHERE id = :version_id
  AND job_id = (SELECT job_id FROM grp JOIN rollout ON rollout.grp_id = grp.id WHERE rollout.id = :id);

-- name: score_rollout
UPDATE rollout SET state = :to, reward = :reward, parts = :parts, text = :text
WHERE id = :id AND state IN (SELECT value FROM json_each(:sources));

-- name: group_progress
SELECT grp.id, grp.job_id, grp.ordinal, grp.state, num_generations,
  sum(rollout.state = 'scored') AS scored,
  sum(rollout.state IN ('scored', 'failed')) AS settled
FROM grp JOIN rollout ON rollout.grp_id = grp.id
WHERE grp.id = (SELECT grp_id FROM rollout WHERE id = :rollout_id)
GROUP BY grp.id;

-- name: move_group
UPDATE grp SET state = :to, reason = :reason
WHERE id = :id AND state IN (SELECT value FROM json_each(:sources))
RETURNING job_id, ordinal;

-- name: rollout_chunks
SELECT rollout_id, start, version_id, step, state = 'lost' AS lost, tok, lp
FROM chunk JOIN policy_version ON policy_version.id = version_id
WHERE rollout_id = :id
ORDER BY start;

-- name: tokens_committed
SELECT collected_tokens + coalesce(
  (SELECT sum(n_tokens) FROM rollout CROSS JOIN grp ON grp.id = grp_id WHERE grp.job_id = job.id), 0)
FROM job WHERE id = :job_id;

-- name: insert_step
INSERT INTO step (job_id, n, version_in, state, seed, max_staleness, settings, numerics, recorded_us)
VALUES (:job_id, :n, :version_in, :state, :seed, :max_staleness, :settings, :numerics, :now)
RETURNING id;

-- name: reserve
UPDATE grp SET state = :to
WHERE id = :id AND job_id = :job_id AND state IN (SELECT value FROM json_each(:sources));

-- name: insert_step_rollout
INSERT INTO step_rollout (step_id, rollout_id, advantage, minibatch, micro_batch, masked, skipped)
VALUES (:step_id, :rollout_id, :advantage, :minibatch, :micro_batch, :masked, :skipped);

-- name: unfaithful_rollouts
-- Rollouts that the step names and that are no scored member of its groups, or the other way round.
SELECT rollout.id FROM step_grp JOIN rollout USING (grp_id)
WHERE step_id = :step_id AND state = 'scored'
  AND rollout.id NOT IN (SELECT rollout_id FROM step_rollout WHERE step_id = :step_id)
UNION ALL
SELECT rollout_id FROM step_rollout JOIN rollout ON rollout.id = rollout_id
WHERE step_id = :step_id
  AND (state <> 'scored' OR grp_id NOT IN (SELECT grp_id FROM step_grp WHERE step_id = :step_id));

-- name: stale_tokens
-- Invariant 4, from the chunks themselves: what the step would train on beyond its bound.
SELECT chunk.rollout_id, step.n - 1 - policy_version.step AS staleness, max_staleness
FROM step JOIN step_rollout ON step_id = step.id JOIN chunk USING (rollout_id)
JOIN policy_version ON policy_version.id = chunk.version_id
WHERE step.id = :step_id AND step.n - 1 - policy_version.step > max_staleness
ORDER BY staleness DESC LIMIT 1;

-- name: overdue_groups
SELECT ordinal, deadline FROM step JOIN step_grp ON step_id = step.id JOIN grp ON grp.id = grp_id
WHERE step.id = :step_id AND deadline < n - 1
ORDER BY deadline LIMIT 1;

-- name: step_rollouts
SELECT step_rollout.*, grp_id FROM step_rollout
JOIN rollout ON rollout.id = rollout_id JOIN step_grp USING (step_id, grp_id)
WHERE step_id = :step_id
ORDER BY position, k;

-- name: first_recorded
SELECT * FROM step WHERE job_id = :job_id AND state <> 'void' AND state = 'recorded' ORDER BY n LIMIT 1;

-- name: applied_after
SELECT * FROM step WHERE job_id = :job_id AND n > :n AND state <> 'void' AND state = 'applied' ORDER BY n;

-- name: apply_step
UPDATE step SET state = :to, version_out = :version_out, fingerprint = :fingerprint, metrics = :metrics,
  applied_us = :now
WHERE id = :id AND state IN (SELECT value FROM json_each(:sources)) AND version_in = (
  SELECT pv.id FROM policy_version AS pv JOIN job ON job.id = pv.job_id AND pv.step = job.step
  WHERE job.id = step.job_id AND step.n = job.step + 1 AND pv.state <> 'lost'
);

-- name: move_step_groups
UPDATE grp SET state = :to
WHERE id IN (SELECT grp_id FROM step_grp WHERE step_id = :step_id)
  AND state IN (SELECT value FROM json_each(:sources));

-- name: apply_to_job
UPDATE job SET step = :n, idle_attempts = 0, updated_us = :now WHERE id = :job_id;

-- name: unlock_next_step
UPDATE step SET version_in = :version_out
WHERE job_id = :job_id AND n = :n + 1 AND state <> 'void' AND version_in IS NULL;

-- name: live_steps_from
SELECT * FROM step WHERE job_id = :job_id AND n >= :n AND state <> 'void' ORDER BY n;

-- name: copy_step_groups
INSERT INTO step_grp (step_id, grp_id, position, void)
SELECT :new, grp_id, position, 0 FROM step_grp WHERE step_id = :old;

-- name: copy_step_rollouts
INSERT INTO step_rollout (step_id, rollout_id, advantage, minibatch, micro_batch, masked, skipped)
SELECT :new, rollout_id, advantage, minibatch, micro_batch, masked, skipped FROM step_rollout WHERE step_id = :old;

-- name: metrics
SELECT n, metrics FROM step WHERE job_id = :job_id AND n > :after AND state <> 'void' AND state = 'applied' ORDER BY n;

-- name: samples
SELECT sample.body FROM step JOIN sample ON sample.step_id = step.id
WHERE job_id = :job_id AND state <> 'void' AND state = 'applied'
ORDER BY n DESC, rollout_id LIMIT :limit;

-- name: insert_checkpoint
INSERT INTO checkpoint (job_id, version_id, dir, state, created_us)
VALUES (:job_id, :version_id, :dir, :state, :now)
RETURNING id;

-- name: checkpoints
SELECT checkpoint.*, step FROM checkpoint JOIN policy_version ON policy_version.id = version_id
WHERE checkpoint.job_id = :job_id
ORDER BY step DESC, checkpoint.id DESC;

-- name: valid_checkpoints
SELECT checkpoint.*, step FROM checkpoint JOIN policy_version ON policy_version.id = version_id
WHERE checkpoint.job_id = :job_id AND checkpoint.state = 'committed' AND policy_version.state <> 'lost'
ORDER BY step DESC, checkpoint.id DESC;

-- name: commit_checkpoint
UPDATE checkpoint SET state = :to, manifest_sha = :manifest_sha, bytes = :bytes
WHERE id = :id AND state IN (SELECT value FROM json_each(:sources));

-- name: move_checkpoint
UPDATE checkpoint SET state = :to WHERE id = :id AND state IN (SELECT value FROM json_each(:sources));

-- name: collectable_groups
-- Groups whose rollouts no replay needs any more: consumed by a step that every kept checkpoint covers, or dropped.
-- Driven from the rollouts that exist: the rows of old groups stay for ever.
SELECT grp.id FROM rollout CROSS JOIN grp ON grp.id = grp_id
WHERE k = 0 AND job_id = :job_id AND (
  (grp.state = 'dropped' AND admitted_step <= :horizon
    AND NOT EXISTS (SELECT 1 FROM rollout AS r WHERE r.grp_id = grp.id AND r.state = 'generating'))
  OR (grp.state = 'consumed' AND :horizon >= (
    SELECT n FROM step_grp JOIN step ON step.id = step_id WHERE step_grp.grp_id = grp.id AND void = 0))
)
LIMIT :limit;

-- name: collected_tokens
UPDATE job SET collected_tokens = collected_tokens + coalesce(
  (SELECT sum(n_tokens) FROM rollout WHERE grp_id = :grp_id), 0)
WHERE id = :job_id;

-- name: delete_chunks
DELETE FROM chunk WHERE rollout_id IN (SELECT id FROM rollout WHERE grp_id = :grp_id);

-- name: delete_step_rollouts
DELETE FROM step_rollout WHERE rollout_id IN (SELECT id FROM rollout WHERE grp_id = :grp_id);

-- name: insert_event
INSERT INTO event (job_id, epoch, us, kind, body)
VALUES (:job_id, coalesce((SELECT epoch FROM daemon), 0), :us, :kind, :body)
RETURNING *;

-- name: record_child
INSERT INTO child (pid, session_id, started_ticks, boot_id, epoch, job_id, role)
VALUES (:pid, :session_id, :started_ticks, :boot_id, :epoch, :job_id, :role)
ON CONFLICT DO NOTHING;

-- name: progress
SELECT
  job.step AS applied,
  (SELECT min(n) FROM step WHERE job_id = job.id AND state = 'recorded') AS recorded,
  (SELECT coalesce(max(n), 0) FROM step WHERE job_id = job.id AND state <> 'void') AS planned,
  (SELECT coalesce(max(v.step), 0) FROM checkpoint AS c JOIN policy_version AS v ON v.id = c.version_id
   WHERE c.job_id = job.id AND c.state = 'committed' AND v.state <> 'lost') AS saved,
  (SELECT coalesce(max(step), 0) FROM policy_version WHERE job_id = job.id AND state = 'published') AS published,
  (SELECT coalesce(max(step), 0) FROM policy_version WHERE job_id = job.id AND state = 'lost') AS lost
FROM job WHERE job.id = :job_id;

-- name: step_facts
SELECT rollout.*, grp.ordinal FROM step_grp
JOIN grp ON grp.id = step_grp.grp_id JOIN rollout ON rollout.grp_id = grp.id
WHERE step_grp.step_id = :step_id ORDER BY grp.ordinal, rollout.k;

-- name: version_spans
SELECT chunk.rollout_id, v.step, sum(chunk.n) AS tokens FROM step_grp
JOIN rollout ON rollout.grp_id = step_grp.grp_id JOIN chunk ON chunk.rollout_id = rollout.id
JOIN policy_version AS v ON v.id = chunk.version_id
WHERE step_grp.step_id = :step_id GROUP BY chunk.rollout_id, v.step ORDER BY chunk.rollout_id, v.step;

-- name: groups_labelled
SELECT DISTINCT grp.id, grp.ordinal FROM policy_version AS v
JOIN chunk ON chunk.version_id = v.id JOIN rollout ON rollout.id = chunk.rollout_id JOIN grp ON grp.id = rollout.grp_id
WHERE v.job_id = :job_id AND v.state <> 'lost' AND v.step IN (SELECT value FROM json_each(:steps))
ORDER BY grp.ordinal;

-- name: park_job
UPDATE rollout SET state = :to, lease_epoch = NULL
WHERE state IN (SELECT value FROM json_each(:sources))
AND grp_id IN (SELECT id FROM grp WHERE job_id = :job_id AND state IN ('open', 'ready'));

-- name: collected_to
SELECT coalesce(max(n), 0) FROM step JOIN step_grp ON step_id = step.id AND void = 0
WHERE job_id = :job_id AND state = 'applied' AND NOT EXISTS (SELECT 1 FROM rollout WHERE grp_id = step_grp.grp_id);
