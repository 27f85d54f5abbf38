// What Argo CD does with an application: compares what git has with what is stored, in each of its three ways, and syncs.
//
// Reads one JSON document on standard input, writes one on standard output. Diff, sync with its waves, and the cache of the
// cluster are Argo CD's own (gitops-engine), and so is Lua's interpreter, with fewer libraries than there.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/argoproj/gitops-engine/pkg/cache"
	"github.com/argoproj/gitops-engine/pkg/diff"
	"github.com/argoproj/gitops-engine/pkg/health"
	"github.com/argoproj/gitops-engine/pkg/sync"
	"github.com/argoproj/gitops-engine/pkg/sync/common"
	"github.com/argoproj/gitops-engine/pkg/utils/kube"
	"github.com/argoproj/gitops-engine/pkg/utils/tracing"
	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Of the objects that an application made: those of it that git has no longer are pruned.
const tracking = "argocd.argoproj.io/tracking-id"

// The field manager of Argo CD.
const manager = "argocd-controller"

type application struct {
	Name       string `json:"name"`
	Kubeconfig string `json:"kubeconfig"`
	Namespace  string `json:"namespace"`
	// What git has, of one namespace.
	Objects []*unstructured.Unstructured `json:"objects"`
	// Health checks by kind.
	Lua map[string]string `json:"lua"`
	// Without it objects are compared, and nothing is written.
	Sync            bool `json:"sync"`
	ServerSideApply bool `json:"serverSideApply"`
	Replace         bool `json:"replace"`
	Prune           bool `json:"prune"`
	DeadlineSeconds int  `json:"deadlineSeconds"`
}

type answer struct {
	// Of the sync: how it ended, and what became of each object.
	Phase   string   `json:"phase"`
	Message string   `json:"message"`
	Synced  []synced `json:"synced"`
	// Objects that Argo CD shows as OutOfSync, by the way of comparing.
	OutOfSync map[string][]difference `json:"outOfSync"`
	// Of each object that is there.
	Health map[string]*health.HealthStatus `json:"health"`
}

type synced struct {
	Object  string `json:"object"`
	Status  string `json:"status"`
	Message string `json:"message"`
}

type difference struct {
	Object    string          `json:"object"`
	Live      json.RawMessage `json:"live"`
	Predicted json.RawMessage `json:"predicted"`
}

func main() {
	var asked application
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		fail(err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", asked.Kubeconfig)
	if err != nil {
		fail(err)
	}
	said, err := run(asked, config)
	if err != nil {
		fail(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(said); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func run(asked application, config *rest.Config) (*answer, error) {
	for _, object := range asked.Objects {
		object.SetNamespace(asked.Namespace)
		annotations := object.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[tracking] = asked.Name
		object.SetAnnotations(annotations)
	}
	isOurs := func(object *unstructured.Unstructured) bool { return object.GetAnnotations()[tracking] == asked.Name }
	stored := cache.NewClusterCache(config,
		cache.SetNamespaces([]string{asked.Namespace}),
		cache.SetLogr(logr.Discard()),
		cache.SetPopulateResourceInfoHandler(func(object *unstructured.Unstructured, _ bool) (any, bool) {
			return isOurs(object), isOurs(object)
		}),
	)
	if err := stored.EnsureSynced(); err != nil {
		return nil, err
	}
	defer stored.Invalidate()
	said := &answer{OutOfSync: map[string][]difference{}, Health: map[string]*health.HealthStatus{}}
	if asked.Sync {
		if err := syncAll(asked, config, stored, said); err != nil {
			return nil, err
		}
	}
	return said, compare(asked, config, stored, said)
}

// With what is stored now: the cache learns of writes a little later.
func reconcile(asked application, stored cache.ClusterCache) (sync.ReconciliationResult, error) {
	managed := func(each *cache.Resource) bool { return each.Info == true }
	live, err := stored.GetManagedLiveObjs(asked.Objects, managed)
	if err != nil {
		return sync.ReconciliationResult{}, err
	}
	return sync.Reconcile(asked.Objects, live, asked.Namespace, stored), nil
}

// One pass after the other, each with what is stored then: that is what the health of a wave is judged by.
func syncAll(asked application, config *rest.Config, stored cache.ClusterCache, said *answer) error {
	var phase common.OperationPhase
	var results []common.ResourceSyncResult
	started := metav1.Now()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(asked.DeadlineSeconds)*time.Second)
	defer cancel()
	for !phase.Completed() && ctx.Err() == nil {
		found, err := reconcile(asked, stored)
		if err != nil {
			return err
		}
		goOn := sync.WithInitialState(phase, said.Message, results, started)
		if phase, said.Message, results, err = syncOnce(asked, config, stored, found, goOn); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
	said.Phase = string(phase)
	for _, each := range results {
		name := each.ResourceKey.Kind + "/" + each.ResourceKey.Name
		said.Synced = append(said.Synced, synced{name, string(each.Status), each.Message})
	}
	return nil
}

func syncOnce(asked application, config *rest.Config, stored cache.ClusterCache, found sync.ReconciliationResult,
	goOn sync.SyncOpt,
) (common.OperationPhase, string, []common.ResourceSyncResult, error) {
	kubectl := &kube.KubectlCmd{Log: logr.Discard(), Tracer: tracing.NopTracer{}}
	pass, cleanup, err := sync.NewSyncContext(asked.Name, found, config, config, kubectl, asked.Namespace,
		stored.GetOpenAPISchema(),
		sync.WithLogr(logr.Discard()),
		sync.WithHealthOverride(checks(asked.Lua)),
		sync.WithPrune(asked.Prune),
		sync.WithReplace(asked.Replace),
		sync.WithServerSideApply(asked.ServerSideApply),
		sync.WithServerSideApplyManager(manager),
		goOn,
	)
	if err != nil {
		return "", "", nil, err
	}
	defer cleanup()
	pass.Sync()
	phase, message, results := pass.GetState()
	return phase, message, results, nil
}

func compare(asked application, config *rest.Config, stored cache.ClusterCache, said *answer) error {
	// A cache that has listed again has seen every write of a sync.
	stored.Invalidate()
	if err := stored.EnsureSynced(); err != nil {
		return err
	}
	applier, cleanup, err := kube.ManageServerSideDiffDryRuns(config, stored.GetOpenAPISchema(), tracing.NopTracer{},
		logr.Discard(), func(string) (kube.CleanupFunc, error) { return func() {}, nil })
	if err != nil {
		return err
	}
	defer cleanup()
	always := []diff.Option{
		diff.WithLogr(logr.Discard()), diff.WithManager(manager), diff.WithGVKParser(stored.GetGVKParser()),
	}
	ways := map[string][]diff.Option{
		"client-side": always,
		"structured":  append([]diff.Option{diff.WithStructuredMergeDiff(true)}, always...),
		"server-side": append([]diff.Option{
			diff.WithServerSideDiff(true),
			diff.WithIgnoreMutationWebhook(true),
			diff.WithServerSideDryRunner(diff.NewK8sServerSideDryRunner(applier)),
		}, always...),
	}
	found, err := reconcile(asked, stored)
	if err != nil {
		return err
	}
	for way, options := range ways {
		said.OutOfSync[way] = []difference{}
		if err := compareOneWay(found, way, options, said); err != nil {
			return fmt.Errorf("%s: %w", way, err)
		}
	}
	for _, live := range found.Live {
		if live != nil {
			said.Health[nameOf(live)], err = health.GetResourceHealth(live, checks(asked.Lua))
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func compareOneWay(found sync.ReconciliationResult, way string, options []diff.Option, said *answer) error {
	for index, target := range found.Target {
		live := found.Live[index]
		result, err := diff.Diff(target, live, options...)
		if err != nil {
			return err
		}
		if result.Modified {
			named := target
			if named == nil {
				named = live
			}
			each := difference{nameOf(named), result.NormalizedLive, result.PredictedLive}
			said.OutOfSync[way] = append(said.OutOfSync[way], each)
		}
	}
	return nil
}

func nameOf(object *unstructured.Unstructured) string {
	return object.GetKind() + "/" + object.GetName()
}
